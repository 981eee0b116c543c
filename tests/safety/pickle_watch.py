"""Put on the path as `sitecustomize.py`: writes down each use of pickle in a Python process.

Every pickler and unpickler that is made, every class that an unpickler looks up, and every file
opened whose ending is a pickle's: a line of JSON in the file that KEEL_PICKLE_LOG names, with the
stack. What is bound before this module runs is the interpreter's own.
"""

import json
import os
import pickle
import sys

ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")


def note(what: str) -> None:
    frame, stack = sys._getframe(2), []
    while frame is not None and len(stack) < 40:
        if "importlib" not in frame.f_code.co_filename:
            stack.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    line = json.dumps({"what": what, "stack": stack}) + "\n"
    log = os.open(os.environ["KEEL_PICKLE_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, line.encode())
    os.close(log)


def hook(event: str, arguments: tuple) -> None:
    if event == "pickle.find_class":
        note(f"find_class {arguments[0]}.{arguments[1]}")
    elif event == "open" and str(arguments[0]).endswith(ENDINGS):
        note(f"open {arguments[0]}")


def watched(kind: type) -> type:
    class Watched(kind):
        def __init__(self, *args, **kwargs):
            note(kind.__name__)
            super().__init__(*args, **kwargs)

    Watched.__name__ = kind.__name__
    return Watched


def wrapped(name: str):
    original = getattr(pickle, name)

    def call(*args, **kwargs):
        note(name)
        return original(*args, **kwargs)

    return call


for name in ("dump", "dumps", "load", "loads"):
    setattr(pickle, name, wrapped(name))
for name in ("Pickler", "Unpickler", "_Pickler", "_Unpickler"):
    setattr(pickle, name, watched(getattr(pickle, name)))
sys.addaudithook(hook)
