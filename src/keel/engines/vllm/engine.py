"""The vLLM engine: completions from a server, with the native engine's semantics."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from shutil import rmtree
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.config.fields import derive
from keel.config.sources import Rollout, VllmServer
from keel.engines.native import copy_weights
from keel.engines.sampler import (
    GOING,
    LENGTH,
    REASONS,
    STOP,
    Stops,
    budgets,
    check,
    completion_texts,
    eos_ids,
    occurrences,
)
from keel.engines.vllm.server import (
    MODEL,
    Sampled,
    ServerFailure,
    ServerProcess,
    VllmClient,
    check_server,
)
from keel.engines.vllm.transfer import (
    FileTransfer,
    WeightTransfer,
    adapter_factors,
    adapters_base,
    checkpoint_weights,
    choose_transfer,
    server_variables,
    shares_gpu,
    writing,
)
from keel.models.families import context_length
from keel.models.lora import plain_weights
from keel.models.policy import token_count
from keel.models.tokenizer_round_trip import quiet
from keel.platform.time_limit import heartbeat, raise_if_cancelled
from keel.types import (
    Capabilities,
    Completion,
    Engine,
    Group,
    KeelError,
    OnGroup,
    Prompt,
    Sampling,
)

MAX_RESTARTS = 3
"""Restarts of the server in one call, after which it fails."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures (but 0) to this one."""
TICK = 0.5
"""Seconds between two looks at whether the call was cancelled."""
CAPABILITIES = Capabilities(streams=True, exact=False)


class VllmEngine(Engine):
    """Samples with a vLLM server that Keel starts, or with one that runs (see `keel.types.Engine`).

    Prompts and completions are token ids. Each completion is a request with a seed of its own, so
    that it does not depend on the rest of the call as far as vLLM's kernels allow. Where it ends,
    and why, is decided by `Stops` over its tokens, as in the native engine; vLLM gets the same
    stops to spare it tokens. The server starts with the first call, from a copy of `model` as it is
    then. One that fails, or takes longer than `timeout` for a request, is started again with the
    current weights, and what was not done is redone. From `sleep` to the next call it sleeps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        server: VllmServer | None = None,
        max_num_seqs: int = 256,
        dtype: str = "model",
        timeout: float = 1800.0,
        log: Path | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Check the settings; nothing is started yet.

        `timeout` is in seconds, of each request. The server's output goes to `log`; without, to a
        temporary file that is kept if the server fails. `note` gets a line for each restart.

        Raises KeelError if `server` names none, and for a model without an end-of-sequence
        token.
        """
        server = VllmServer() if server is None else server
        check_server(server)
        self.model = model
        self.tokenizer = tokenizer
        rows = int(model.config.get_text_config().vocab_size)
        padding = {str(id): -100.0 for id in range(token_count(tokenizer), rows)}
        self._without_padding = {"logit_bias": padding} if padding else {}
        """Takes the probability of ids without a token: vLLM samples any row of the head."""
        self.server = server
        self.max_num_seqs = max_num_seqs
        self.dtype = dtype
        self.timeout = timeout
        shared = server.url is None and shares_gpu(model.device, server.gpus)
        self.sleep_level = int(shared) if server.sleep_level is None else server.sleep_level
        self._asleep = 0
        """The level at which the server sleeps; 0: it is awake."""
        self._note = note
        self.capabilities = replace(CAPABILITIES, context=context_length(model))
        self.eos = eos_ids(model, tokenizer)
        self._syncs = 0
        self.restarts = 0
        """How often a server that failed was started again."""
        self.process: ServerProcess | None = None
        self._client: VllmClient | None = None
        self._name = MODEL
        self._folder = Path(tempfile.mkdtemp(prefix="keel-vllm-"))
        finalize(self, rmtree, self._folder, ignore_errors=True)
        temporary = self._folder.with_suffix(".log")
        self._log = log or temporary
        self._unlink = finalize(self, temporary.unlink, missing_ok=True)
        """Removes a temporary log with the engine, unless an error names it."""
        self._transfer: WeightTransfer = FileTransfer({})

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """`n` completions for each prompt; see `keel.types.Engine`.

        Raises KeelError for invalid settings, a prompt without tokens or too long for the context,
        log-probs that are not finite, and a server that keeps failing.
        """
        check(sampling, n)
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise KeelError(
                f"sampling.temperature = {sampling.temperature} is raised to {LOWEST_TEMPERATURE} "
                f"by vLLM: set it to {LOWEST_TEMPERATURE} or above, or to 0 (greedy)"
            )
        limits = budgets(prompts, sampling, self.capabilities.context).tolist()
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        eos = () if sampling.ignore_eos else self.eos
        stops = Stops(eos, sampling, self.tokenizer, vocabulary)
        shared = {**_vllm_settings(stops, sampling), **self._without_padding}
        times = occurrences([prompt.id for prompt in prompts])
        requests: dict[tuple[int, int], tuple[list[int], dict[str, Any]]] = {}
        for p, prompt in enumerate(prompts):
            for i in range(n):
                number = derive(seed, "vllm", prompt.id, times[p], i)
                settings = {**shared, "max_tokens": limits[p], "seed": number}
                requests[p, i] = (list(prompt.tokens), settings)
        done: dict[tuple[int, int], Completion] = {}
        groups: dict[int, Group] = {}

        def take(place: tuple[int, int], sampled: Sampled) -> None:
            p, i = place
            done[place] = self._completion(prompts[p], sampled, limits[p], stops, p * n + i)
            if all((p, i) in done for i in range(n)):
                groups[p] = Group(prompts[p], tuple(done[p, i] for i in range(n)))
                if on_group is not None:
                    on_group(p, groups[p])

        def run() -> None:
            self._hand_over()
            self._complete({k: v for k, v in requests.items() if k not in done}, take)

        if requests:
            self._redoing(run, MAX_RESTARTS)
        return [groups[p] for p in range(len(prompts))]

    def sync(self, weights: Mapping[str, Any]) -> None:
        """Take over the policy's weights, by the names of `model`.

        The server loads them through vLLM's weight transfer. Of LoRA adapters only their factors
        are sent, and the server adds them to the base that it keeps. Its prefix cache is emptied.
        """
        copy_weights(self.model, weights)
        self._syncs += 1
        if self._client is not None:
            changed = {n: w.detach() for n, w in weights.items() if ".lora_" not in n}

            def learned() -> dict[str, Tensor]:
                return checkpoint_weights(self.model, changed) | adapter_factors(self.model)

            # Sent again to a new server, which has them: another failure would come at every sync.
            self._redoing(partial(self._hand_over, learned), 1)

    def sleep(self) -> None:
        """Let the server free its memory until the next call, as `sleep_level` says."""

        def fall_asleep() -> None:
            assert self._client is not None
            self._client.sleep(self.sleep_level)
            self._asleep = self.sleep_level

        if self._client is not None and self.sleep_level and not self._asleep:
            self._redoing(fall_asleep, 1)

    def close(self) -> None:
        """End the server that this engine started."""
        if self.process is not None:
            self.process.stop()
        self.process = self._client = None
        self._asleep = 0

    # ---------------------------------------------------------------- the server

    def _redoing(self, call: Callable[[], None], restarts: int) -> None:
        """Call, and again after each of at most `restarts` restarts of a server that failed."""
        for left in reversed(range(restarts + 1)):
            try:
                if self._client is None:
                    self._start()
                call()
                return
            except ServerFailure as failure:
                self.close()
                if self.server.url is not None:
                    raise KeelError(f"the vLLM server failed: {failure}") from None
                if not left:
                    self._unlink.detach()
                    times = "once" if restarts == 1 else f"{restarts} times"
                    raise KeelError(
                        f"the vLLM server failed (restarted {times}): {failure}: see {self._log}"
                    ) from None
                self._restarting(failure)

    def _restarting(self, failure: ServerFailure) -> None:
        """Tell of a restart, in the server's log too, which has what the server said before."""
        self.restarts += 1
        text = f"the vLLM server failed and is started again: {failure}"
        with suppress(OSError), self._log.open("a", encoding="utf-8") as log:
            log.write(f"keel: {text}\n")
        if self._note is not None:
            self._note(f"{text}: see {self._log}")

    def _start(self) -> None:
        device, started = self.model.device, self.server.url is None
        base = adapters_base(self.model)
        self._transfer = choose_transfer(device, self.server.gpus, base, started)
        if self.server.url is not None:
            client = VllmClient(self.server.url, self.timeout)
            self._name = client.model()
            self._transfer.prepare(client)
            self._client = client
            self._send(checkpoint_weights(self.model, plain_weights(self.model)))
            return
        assert self.server.interpreter is not None
        self._log.parent.mkdir(exist_ok=True)
        self._save(self._folder / "model")
        process = ServerProcess(
            self.server.interpreter,
            self._folder,
            self._log,
            self._options(),
            backend=self._transfer.backend,
            variables=server_variables(self.model.device, self.server.gpus),
        )
        try:
            client = VllmClient(process.url, self.timeout)
            process.wait(client, self.server.start_timeout)
            self._transfer.prepare(client)
        except BaseException:
            self._unlink.detach()
            process.stop()
            raise
        finally:
            rmtree(self._folder / "model", ignore_errors=True)
        self.process, self._client = process, client

    def _options(self) -> list[str]:
        dtype = self.dtype if self.dtype != "model" else str(self.model.dtype).split(".")[-1]
        options = ["--dtype", dtype, "--max-num-seqs", str(self.max_num_seqs)]
        if self.capabilities.context is not None:
            options += ["--max-model-len", str(self.capabilities.context)]
        if self.model.device.type == "cpu":
            options += ["--enforce-eager"]
        else:
            options += ["--gpu-memory-utilization", str(self.server.gpu_memory_utilization)]
            options += ["--tensor-parallel-size", str(max(1, len(self.server.gpus)))]
            options += ["--enable-sleep-mode"] if self.sleep_level else []
        return [*options, *self.server.arguments]

    def _save(self, folder: Path) -> None:
        with quiet(), writing(self._folder):
            self.model.save_pretrained(folder, state_dict=plain_weights(self.model))
            self.tokenizer.save_pretrained(folder)

    def _hand_over(self, weights: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        """Send what `weights` makes, if given, and wake the server: its weights first, all of which
        are sent if it dropped them, then its cache, for which no copy of them may be left."""
        assert self._client is not None
        level = self._asleep
        if level:
            torch.cuda.empty_cache()  # what the trainer's allocator keeps is the server's again
            self._client.wake_up("weights")
        if level == 2:
            self._send(checkpoint_weights(self.model, plain_weights(self.model)))
        elif weights is not None:
            self._send(weights())
        if level:
            torch.cuda.empty_cache()
            self._client.wake_up("kv_cache")
            self._asleep = 0

    def _send(self, weights: Mapping[str, Tensor]) -> None:
        assert self._client is not None
        try:
            self._transfer.send(self._client, weights, self._syncs)
        except KeelError as error:
            raise KeelError(f"the vLLM server did not take the weights over: {error}") from None

    # ---------------------------------------------------------------- completions

    def _complete(
        self,
        requests: Mapping[tuple[int, int], tuple[list[int], dict[str, Any]]],
        take: Callable[[tuple[int, int], Sampled], None],
    ) -> None:
        """Send requests, at most `max_num_seqs` at once; hand each result over in this thread."""
        assert self._client is not None
        left = iter(requests.items())
        sent: dict[Future[Sampled], tuple[int, int]] = {}
        try:
            while True:
                for place, request in islice(left, self.max_num_seqs - len(sent)):
                    sent[self._client.complete(self._name, *request)] = place
                if not sent:
                    return
                ready, _ = wait(sent, TICK, return_when=FIRST_COMPLETED)
                raise_if_cancelled()
                heartbeat()  # each request has its own time limit
                for place, future in sorted((sent.pop(future), future) for future in ready):
                    take(place, future.result())
        finally:
            for future in sent:
                future.cancel()

    def _completion(
        self, prompt: Prompt, sampled: Sampled, limit: int, stops: Stops, sequence: int
    ) -> Completion:
        """The completion in a reply, cut where the native engine would have ended it."""
        one = np.array([sequence], dtype=np.int64)
        code, length = GOING, 0
        for length, token in enumerate(sampled.tokens, start=1):
            spent = np.array([length >= limit])
            code = int(stops.check(one, np.array([token], dtype=np.int64), spent)[0])
            if code != GOING:
                break
        if code == GOING:  # vLLM's own decoding found a stop string, or its context was shorter
            code = STOP if sampled.finish == "stop" else LENGTH
        tokens = np.array(sampled.tokens[:length], dtype=np.int64)
        log_probs = np.array(sampled.log_probs[:length], dtype=np.float32)
        if not np.isfinite(log_probs).all() or (log_probs < -9998).any():
            raise KeelError(
                f"the log-probs for prompt '{prompt.id}' are not finite: the weights are broken or "
                "have diverged; use an earlier checkpoint or a lower learning rate"
            )
        return Completion(
            tokens=tokens,
            log_probs=log_probs,
            written=np.ones(length, dtype=np.bool_),
            finish=REASONS[code],
            text=completion_texts(self.tokenizer, [tokens.tolist()], [code])[0],
        )


def build_vllm(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    rollout: Rollout,
    dtype: str,
    log: Path | None,
    note: Callable[[str], None] | None,
    **_: Any,
) -> VllmEngine:
    """The vLLM engine of a recipe; see `keel.engines.registry.build_engine`."""
    return VllmEngine(
        model,
        tokenizer,
        server=rollout.vllm.model_copy(update={"sleep_level": 0})
        if rollout.async_level
        else rollout.vllm,
        max_num_seqs=rollout.max_num_seqs,
        dtype=dtype,
        timeout=rollout.timeout,
        log=log,
        note=note,
    )


def _vllm_settings(stops: Stops, sampling: Sampling) -> dict[str, Any]:
    """The settings of all requests of a call, in vLLM's terms."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop": list(stops.strings),
        "stop_token_ids": stops.ids(),
        "ignore_eos": sampling.ignore_eos,
    }
