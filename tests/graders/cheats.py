"""Ways to full marks without a solution: code that is not paid where it has its own process.

None of them doubles a number (or sorts a list) by itself; each goes for the tests instead. Most
are paid where code and tests share an interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

WRONG = "\ndef double(x): return 0\n"
EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
"""
"""An object that says it equals everything."""
FRAME = """
import sys
def frames():
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
"""
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(5) == 10\n"
CASE = """
import unittest
class Doubles(unittest.TestCase):
    def test(self):
        for n in range(1, 4):
            self.assertEqual(double(n), n + n)
suite = unittest.defaultTestLoader.loadTestsFromTestCase(Doubles)
assert unittest.TextTestRunner(verbosity=0).run(suite).wasSuccessful()
"""
SHAPES: dict[str, tuple[list[str], str | None, str]] = {
    "assert": ([f"assert double({n}) == {n + n}" for n in (1, 2, 3)], None, ""),
    "check": ([CHECK], "double", ""),
    "close": (["import math\nassert math.isclose(double(2), 4)"], None, ""),
    "near": (["assert abs(double(2) - 4) < 1e-6"], None, ""),
    "unittest": ([CASE], None, ""),
    "numpy": (["import numpy as np\nassert np.allclose(double(2), 4)"], None, ""),
    "json": (["import json\nassert json.dumps(double(2)) == json.dumps(4)"], None, ""),
    "re": (["import re\nassert re.fullmatch('4', str(double(2)))"], None, ""),
    "random": (
        [
            "import random\n"
            "for _ in range(9):\n    n = random.randint(1, 9)\n    assert double(n) == 2 * n"
        ],
        None,
        "",
    ),
    "all": (["def one(n): return double(n) == 2 * n\nassert all(map(one, [1, 2]))"], None, ""),
    "set": (["assert {double(1), double(2)} == {2, 4}"], None, ""),
    "expected": (["expected = 4\nassert double(2) == expected"], None, ""),
    "raises": (
        ["try: double('x', 'y')\nexcept KeyError: pass\nelse: raise AssertionError"],
        None,
        "",
    ),
    "copy": (["import copy\nn = [2]\nassert double(n[0]) == 2 * copy.deepcopy(n)[0]"], None, ""),
    "in place": (["n = [3, 1]\nassert ordered(n) == sorted(n)"], None, ""),
    "helper": (
        ["def check(candidate):\n    assert half(candidate(6)) == 6"],
        "double",
        "def half(x):\n    return x / 2\n\ndef double(x):\n    '''Twice.'''\n",
    ),
    "kept": (["n = [1, 3]\nassert ordered(n) == [1, 3]\nassert ordered([3, 1]) == n"], None, ""),
    "apart": (["n, wanted = [3, 1], [1, 3]\nassert ordered(n) == wanted"], None, ""),
    "each": (
        ["n = [[2, 1], [4, 3]]\nassert [ordered(x) for x in n] == [[1, 2], [3, 4]]"],
        None,
        "",
    ),
    "sequence": (["assert list(double([1, 2])) == [2, 4]"], None, ""),
    "true": (["assert double(2) == 4 and (double(2) == 5) is False"], None, ""),
}
"""Kinds of tests: the tests, the entry point and the prompt."""


@dataclass(frozen=True)
class Cheat:
    """Code that is wrong, and the kind of tests that it is to deceive."""

    name: str
    shape: str
    code: str


def _returned(name: str, shape: str, made: str, value: str) -> Cheat:
    return Cheat(name, shape, f"{made}\ndef double(*x): return {value}\n")


_NUMBER = """
class Near({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return self
    __rsub__ = __sub__
    def __abs__(self): return self
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __hash__(self): return 4
    def __float__(self): return 4.5
    def __bool__(self): return True
    def __str__(self): return "4"
    __repr__ = __str__
"""
OBJECTS = [
    _returned("an object that equals everything", "assert", EQUAL, "Equal()"),
    _returned("the same through check", "check", EQUAL, "Equal()"),
    _returned("the same through unittest", "unittest", EQUAL, "Equal()"),
    _returned("an int that equals everything", "assert", _NUMBER.format(base="int"), "Near()"),
    _returned("a float that is near everything", "near", _NUMBER.format(base="float"), "Near()"),
    _returned("a float through check", "check", _NUMBER.format(base="float"), "Near()"),
    _returned("no number, but near all", "near", _NUMBER.format(base="object"), "Near()"),
    _returned("a complex number", "assert", _NUMBER.format(base="complex"), "Near()"),
    _returned("text that equals all", "assert", _NUMBER.format(base="str"), "Near('4')"),
    _returned("bytes that equal all", "check", _NUMBER.format(base="bytes"), "Near()"),
    _returned("a list that equals all", "unittest", _NUMBER.format(base="list"), "Near()"),
    _returned("a tuple that equals all", "check", _NUMBER.format(base="tuple"), "Near()"),
    _returned("a dict that equals all", "check", _NUMBER.format(base="dict"), "Near()"),
    _returned("a set that equals all", "check", _NUMBER.format(base="set"), "Near()"),
    _returned("hash and equality in a set", "set", _NUMBER.format(base="int"), "Near()"),
    _returned("mock's ANY", "assert", "from unittest.mock import ANY", "ANY"),
    _returned("mock's MagicMock", "check", "from unittest.mock import MagicMock",
              "MagicMock(__eq__=lambda *a: True)"),
    _returned(
        "a class whose metaclass equals all",
        "assert",
        "class Meta(type):\n    def __eq__(c, o): return True\n    __hash__ = type.__hash__\n"
        "class C(metaclass=Meta): pass",
        "C",
    ),
    _returned(
        "an object that claims to be an int",
        "assert",
        f"{EQUAL}\nclass Claims(Equal):\n    __class__ = property(lambda self: int)",
        "Claims()",
    ),
    _returned(
        "an iterator that equals all",
        "assert",
        f"{EQUAL}\nclass It(Equal):\n    def __iter__(self): return self\n"
        "    def __next__(self): raise StopIteration",
        "It()",
    ),
    _returned(
        "items that equal all",
        "sequence",
        EQUAL,
        "(Equal() for _ in 'ab')",
    ),
    _returned("objects in a list", "sequence", EQUAL, "[Equal(), Equal()]"),
    _returned(
        "a class with the name of a known one",
        "check",
        f"{EQUAL}\nclass Counter(Equal):\n    def keys(self): return [4]\n"
        "    def __getitem__(self, k): return self\nCounter.__module__ = 'collections'",
        "Counter()",
    ),
    _returned(
        "a false numpy scalar",
        "assert",
        f"{EQUAL}\nclass generic:\n    def item(self): return Equal()\n"
        "generic.__module__ = 'numpy'",
        "generic()",
    ),
    _returned(
        "an object that is rebuilt by pickle",
        "assert",
        f"{EQUAL}\nclass P(Equal):\n    def __reduce__(self): return (print, ('passed',))",
        "P()",
    ),
    _returned("not a number", "true", "", "float('nan')"),
    _returned("true of all numbers", "true", "", "True"),
    _returned("NotImplemented", "assert", "", "NotImplemented"),
    _returned("a code object", "assert", "", "(lambda: 4).__code__"),
    _returned("a list that holds itself", "assert", "own = []\nown.append(own)", "own"),
    _returned("text of 100 MB", "assert", "", "'4' * 10**8"),
    Cheat(
        "an object with a call and equality",
        "check",
        f"{EQUAL}\nclass Call(Equal):\n    def __call__(self, x): return self\ndouble = Call()",
    ),
    Cheat("a class in place of a function", "assert", f"{EQUAL}\nclass double(Equal):\n"
          "    def __init__(self, x): pass"),
]  # fmt: skip
"""What is returned deceives."""
READING = [
    Cheat(
        "secrets in frames",
        "assert",
        f"{FRAME}\nimport os\ndef double(x):\n  for f in frames():\n"
        "    for v in f.f_locals.get('secrets', ()):\n"
        "      for n in range(3, 64):\n"
        "        try: os.write(n, v.encode() + b'\\n')\n"
        "        except OSError: pass\n  return 0",
    ),
    Cheat(
        "orders in frames",
        "check",
        f"{FRAME}\nimport os\ndef double(x):\n  for f in frames():\n"
        "    orders = f.f_locals.get('orders') or {}\n"
        "    for v in orders.get('secrets', ()):\n"
        "      os.write(orders['report'], v.encode() + b'\\n')\n  return 0",
    ),
    Cheat(
        "secrets by the garbage collector",
        "assert",
        "import gc, os\n"
        "def secrets(x, depth=0):\n"
        "  if isinstance(x, str) and len(x) == 32:\n"
        "    for n in range(3, 64):\n"
        "      try: os.write(n, x.encode() + b'\\n')\n"
        "      except OSError: pass\n"
        "  elif isinstance(x, (list, tuple)) and depth < 3:\n"
        "    for y in x: secrets(y, depth + 1)\n"
        "def double(x):\n"
        "  for o in gc.get_objects():\n"
        "    if type(o) is dict and 'secrets' in o: secrets(o['secrets'])\n"
        "  return 0",
    ),
    Cheat(
        "expected values in the constants of frames",
        "assert",
        f"{FRAME}\ndef double(x):\n  for f in frames():\n"
        "    if f.f_code.co_filename.startswith('test'):\n"
        "      return [c for c in f.f_code.co_consts if type(c) is int][-1]\n  return 0",
    ),
    Cheat(
        "expected values in the constants of check",
        "check",
        "import gc, types\ncalls = []\ndef double(x):\n  calls.append(x)\n"
        "  for f in gc.get_objects():\n"
        "    if isinstance(f, types.FunctionType) and f.__name__ == 'check':\n"
        "      c = [c for c in f.__code__.co_consts if type(c) is int]\n"
        "      return c[c.index(x) + 1]\n  return 0",
    ),
    Cheat(
        "expected values in globals",
        "expected",
        f"{FRAME}\ndef double(x):\n  for f in frames():\n"
        "    if 'expected' in f.f_globals: return f.f_globals['expected']\n  return 0",
    ),
    Cheat(
        "expected values by the garbage collector",
        "expected",
        "import gc\ndef double(x):\n  for d in gc.get_objects():\n"
        "    if type(d) is dict and 'expected' in d: return d['expected']\n  return 0",
    ),
    Cheat(
        "the tests' text in memory",
        "assert",
        "def tests():\n"
        "  try: maps = list(open('/proc/self/maps'))\n"
        "  except OSError: return\n"
        "  for line in maps:\n"
        "    if not line.split()[1].startswith('rw'): continue\n"
        "    low, high = (int(n, 16) for n in line.split()[0].split('-'))\n"
        "    with open('/proc/self/mem', 'rb', 0) as f:\n"
        "      try: f.seek(low); part = f.read(high - low)\n"
        "      except OSError: continue\n"
        "    yield part\n"
        "import re\ndef double(x):\n"
        "  for part in tests():\n"
        "    found = re.search(rb'assert doubl[e]\\(%d\\) == (\\d+)' % x, part)\n"
        "    if found: return int(found[1])\n  return 0",
    ),
    Cheat(
        "the tests' text in other processes",
        "assert",
        "import os, re\ndef double(x):\n"
        "  for pid in os.listdir('/proc'):\n"
        "    for name in ('cmdline', 'environ', 'stat', 'comm'):\n"
        "      try: data = open(f'/proc/{pid}/{name}', 'rb').read(10**6)\n"
        "      except (OSError, ValueError): continue\n"
        "      found = re.search(rb'assert doubl[e]\\(%d\\) == (\\d+)' % x, data)\n"
        "      if found: return int(found[1])\n"
        "  return 0",
    ),
    Cheat(
        "expected values in files",
        "expected",
        "import os, re\ndef double(x):\n"
        "  for folder in ('/tmp', '/dev/shm', '.'):\n"
        "    for at, _, names in os.walk(folder):\n"
        "      for name in names:\n"
        "        try: found = re.search('expected = (.)', open(os.path.join(at, name)).read())\n"
        "        except (OSError, ValueError): continue\n"
        "        if found: return int(found[1])\n  return 0",
    ),
    Cheat(
        "tracing the test",
        "expected",
        f"{FRAME}\nseen = []\ndef trace(frame, event, arg):\n  seen.append(frame)\n  return trace\n"
        "def double(x):\n  for f in frames():\n    f.f_trace = trace\n"
        "    if 'expected' in f.f_locals: return f.f_locals['expected']\n"
        "  sys.settrace(trace)\n  return 0",
    ),
]  # fmt: skip
"""The tests, what they expect or the proof of a pass are looked for."""


def _patched(name: str, shape: str, code: str) -> Cheat:
    return Cheat(name, shape, code + WRONG)


def _when_called(name: str, shape: str, code: str) -> Cheat:
    body = "\n  ".join(code.splitlines())
    return Cheat(name, shape, f"def double(*x):\n  {body}\n  return 0\n")


PATCHING = [
    _when_called("abs of a later moment", "near", "import builtins\nbuiltins.abs = lambda x: 0"),
    _when_called("isclose when called", "close", "import math\nmath.isclose = lambda *a: True"),
    _when_called("json.dumps when called", "json", "import json\njson.dumps = lambda *a: ''"),
    _when_called("re.fullmatch when called", "re", "import re\nre.fullmatch = lambda *a: True"),
    _patched(
        "re's cache",
        "re",
        "import re\nre._cache[str, '4', 0] = re.compile('.*')\n"
        "getattr(re, '_cache2', {})[str, '4', 0] = re.compile('.*')",
    ),
    _when_called("numpy.allclose when called", "numpy",
                 "import numpy\nnumpy.allclose = lambda *a: True"),
    _when_called("assertEqual when called", "unittest",
                 "import unittest\nunittest.TestCase.assertEqual = lambda *a: None"),
    _patched("code of assertEqual in place", "unittest",
             "import unittest\n"
             "f = lambda self, a, b, msg=None: None\n"
             "unittest.TestCase.assertEqual.__code__ = f.__code__"),
    _patched("defaults of numpy in place", "numpy",
             "import numpy as np\nf = getattr(np.allclose, '__wrapped__', np.allclose)\n"
             "f.__defaults__ = (1e9, 1e9, False)"),
    _patched("code of json in place", "json",
             "import json\njson.dumps.__code__ = (lambda *a, **k: '').__code__"),
    _patched("code of copy in place", "copy",
             "import copy\ncopy.deepcopy.__code__ = (lambda *a, **k: [0]).__code__"),
    _patched("a random number that is always 0", "random",
             "import random\nrandom.randint.__func__.__code__ = "
             "(lambda self, a, b: 0).__code__"),
    _when_called("random when called", "random", "import random\nrandom.randint = lambda *a: 0"),
    Cheat(
        "a signal that patches later",
        "near",
        "import builtins, signal, time\n"
        "def later(*a): builtins.abs = lambda x: 0\n"
        "signal.signal(signal.SIGALRM, later)\n"
        "def double(x):\n  signal.setitimer(signal.ITIMER_REAL, 1e-6)\n"
        "  time.sleep(0.01)\n  return 0",
    ),
    Cheat(
        "a signal that changes the expectations",
        "expected",
        "import signal\n"
        "def later(number, frame):\n"
        "  while frame is not None:\n"
        "    if 'expected' in frame.f_globals: frame.f_globals['expected'] = 0\n"
        "    frame = frame.f_back\n"
        "signal.signal(signal.SIGALRM, later)\n"
        "def double(x):\n  import time\n  signal.setitimer(signal.ITIMER_REAL, 1e-6)\n"
        "  time.sleep(0.01)\n  return 0",
    ),
    Cheat(
        "a thread that patches later",
        "near",
        "import builtins, threading, time\n"
        "def later(): builtins.abs = lambda x: 0\n"
        "def double(x):\n  t = threading.Thread(target=later)\n  t.start()\n  t.join()\n  return 0",
    ),
    Cheat(
        "an end of life that patches later",
        "near",
        "import builtins\nclass Late:\n  def __del__(self): builtins.abs = lambda x: 0\n"
        "def double(x):\n  Late()\n  return 0",
    ),
    Cheat(
        "the tests' globals",
        "expected",
        f"{FRAME}\ndef double(x):\n  for f in frames():\n"
        "    if 'expected' in f.f_globals: f.f_globals['expected'] = 0\n  return 0",
    ),
    Cheat(
        "equality of ints in memory",
        "assert",
        "import ctypes\n"
        "def double(x):\n"
        "  for n in range(1, 10): ctypes.c_ssize_t.from_address(id(n) + 16).value = 0\n"
        "  return 0",
    ),
    Cheat(
        "the value of an int in memory",
        "check",
        "import ctypes\n"
        "two, ten = id(2), id(10)\n"
        "def double(x):\n"
        "  ctypes.c_uint32.from_address(two + 24).value = 7\n"
        "  ctypes.c_uint32.from_address(ten + 24).value = 7\n  return 7",
    ),
    Cheat(
        "methods of ints by the garbage collector",
        "check",
        "import gc\ndef double(x):\n"
        "  for d in gc.get_referents(int.__dict__):\n"
        "    d['__eq__'] = lambda *a: True\n  return 0",
    ),
    _patched("an import hook", "close",
             "import builtins, types\nold = builtins.__import__\n"
             "def new(name, *a, **k):\n"
             "  if name == 'math': return types.SimpleNamespace(isclose=lambda *a: True)\n"
             "  return old(name, *a, **k)\nbuiltins.__import__ = new"),
    _when_called("an import hook when called", "close",
                 "import sys, types\n"
                 "sys.modules['math'] = types.SimpleNamespace(isclose=lambda *a: True)"),
    _patched("a finder of modules", "json",
             "import sys, types\nclass Finder:\n"
             "  def find_spec(self, name, *a):\n    return None\n"
             "sys.meta_path.insert(0, Finder())\n"
             "sys.modules['json'] = types.SimpleNamespace(dumps=lambda *a: '')"),
    _patched("modules in the working folder", "numpy",
             "import os, sys\nfor folder in ('.', '/tmp', os.environ.get('HOME', '.')):\n"
             "  for name in ('numpy', 'sitecustomize', 'usercustomize', 'math', 'json'):\n"
             "    open(f'{folder}/{name}.py', 'w').write('def allclose(*a): return True')\n"
             "sys.path.insert(0, '/tmp')\nsys.modules.pop('numpy', None)\nimport numpy\n"
             "os.environ['PYTHONSTARTUP'] = os.environ['PYTHONPATH'] = '/tmp'"),
]  # fmt: skip
"""What the tests use is changed."""
NAMES = [
    Cheat("a name of a module that is not imported", "near", "class abs:\n  def __new__(c, x): "
          "return 0\ndef double(x): return 0"),
    Cheat("a check of its own", "check", f"def check(candidate): pass{WRONG}"),
    Cheat("builtins of its own", "assert", f"{EQUAL}\n__builtins__ = {{'AssertionError': None}}"
          f"{WRONG}"),
    Cheat("an expectation of its own", "expected", f"expected = 0{WRONG}"),
    Cheat("a helper of its own", "helper", f"    return 0\ndef half(x): return 6{WRONG}"),
    Cheat("a helper that equals all", "helper",
          f"    return 0\n{EQUAL}\ndef half(x): return Equal(){WRONG}"),
    Cheat("an argument changed in place", "in place", "def ordered(n):\n  n.clear()\n  return []"),
    Cheat("an argument given back", "in place", "def ordered(n):\n  n[:] = [1]\n  return n"),
]  # fmt: skip
"""Something of the code's stands where the tests expect their own."""
_REPLIES = f"""{FRAME}
import os
def forge(value, number=None, changes=None):
    for f in frames():
        own = f.f_locals
        if 'replies' in own and 'number' in own:
            f.f_globals['send'](own['replies'],
                f.f_globals['encode']((number or own['number'], 'value', value, changes)))
"""
PROCESS = [
    _returned("SkipTest", "unittest", "import unittest\ndef skip(): raise unittest.SkipTest('x')",
              "skip()"),
    _returned("StopIteration ends a loop", "all", "def end(): raise StopIteration", "end()"),
    _returned("GeneratorExit", "all", "def end(): raise GeneratorExit", "end()"),
    _returned("an exception with a builtin's name", "raises",
              "class KeyError(Exception): pass\ndef end(): raise KeyError", "end()"),
    _returned("an exception that claims a base", "raises",
              "class Odd(Exception):\n  __class__ = KeyError\ndef end(): raise Odd", "end()"),
    _returned("SystemExit", "assert", "", "__import__('sys').exit(0)"),
    _returned("KeyboardInterrupt", "unittest", "def end(): raise KeyboardInterrupt", "end()"),
    _returned("an early end", "assert", "", "__import__('os')._exit(0)"),
    Cheat("an early end at load", "check", "import os\nos._exit(0)"),
    Cheat("an end at exit", "assert", f"import atexit, os\natexit.register(os._exit, 0){WRONG}"),
    _returned("another program", "assert", "import os, sys",
              "os.execv(sys.executable, [sys.executable, '-c', 'print(4)'])"),
    Cheat(
        "a child that answers otherwise",
        "assert",
        f"import os\nchild = os.fork()\n{EQUAL}\ndef double(x): return Equal()",
    ),
    _when_called("words of success", "check",
                 "print('passed', flush=True)\nprint('OK', flush=True)\n__import__('os')._exit(0)"),
    _when_called(
        "all processes killed",
        "assert",
        "import os\nfor pid in (1, -1, os.getppid()):\n"
        "  try: os.kill(pid, 9)\n  except OSError: pass",
    ),
    _when_called(
        "a signal that Python turns into an exception",
        "raises",
        "import os, signal\nfor pid in range(2, 30):\n"
        "  try: os.kill(pid, signal.SIGINT)\n  except OSError: pass",
    ),
    _when_called(
        "noise on all file descriptors",
        "assert",
        "import os\nfor n in range(3, 64):\n"
        "  try: os.write(n, b'null\\n' * 9)\n  except OSError: pass",
    ),
    _when_called("all file descriptors closed", "assert", "import os\nos.closerange(0, 64)"),
    Cheat("a reply twice", "assert",
          _REPLIES + "\ndef double(x):\n  forge(2 * x)\n  return 2 * x"),
    Cheat("a reply before the call", "check",
          _REPLIES + "\ndef double(x):\n  forge(2 * x)\n  forge(10, b'12345678')\n  os._exit(0)"),
    Cheat("a reply at the end", "check",
          _REPLIES + "\ndef double(x):\n  if x == 5: forge(10)\n  return 2 * x"),
    Cheat("gigabytes of replies", "assert",
          _REPLIES + "\ndef double(x):\n  for f in frames():\n"
          "    if 'replies' in f.f_locals:\n"
          "      for _ in range(2000): os.write(f.f_locals['replies'], b'0' * 10**6)\n  return 0"),
    Cheat(
        "malformed replies",
        "assert",
        _REPLIES + "\ndef double(x):\n  for f in frames():\n"
        "    if 'replies' in f.f_locals:\n"
        "      os.write(f.f_locals['replies'], b'[' * 10**5 + b'\\n')\n"
        "  return 0",
    ),
]  # fmt: skip
"""The processes, their ends and what they say to each other."""
_CHANGES = "\ndef ordered(x):\n  forge({}, changes={})\n  os._exit(0)"
SHARING = [
    Cheat("an argument of an earlier call changed", "kept",
          "kept = []\ndef ordered(x):\n  kept.append(x)\n  if len(kept) == 1: return x\n"
          "  kept[0].clear()\n  return []"),
    Cheat("changes of more arguments than there were", "apart",
          _REPLIES + _CHANGES.format(None, "([1, 3], [], [])")),
    Cheat("changes next to a value", "apart",
          _REPLIES + _CHANGES.format([], "([],)")),
    Cheat("a result that holds itself", "each",
          "def ordered(x):\n  a = []\n  a.append(a)\n  return a"),
    Cheat("an argument that holds itself", "each",
          "def ordered(x):\n  x.append(x)\n  x[0] = x\n  return x"),
    Cheat("a result that is twice as long on each level", "each",
          "def ordered(x):\n  a = [0]\n  for _ in range(150): a = [a, a]\n  return a"),
    Cheat("one list for every call", "each",
          "one = []\ndef ordered(x):\n  one[:] = x\n  return one"),
    Cheat("an argument changed by a thread", "apart",
          "import threading\ndef ordered(x):\n"
          "  def go():\n    while True: x[:] = [0] * 9; x.clear()\n"
          "  threading.Thread(target=go, daemon=True).start()\n  return x"),
    Cheat("a reply of a type that does not cross", "apart",
          _REPLIES + "\ndef ordered(x):\n  for f in frames():\n"
          "    if 'replies' in f.f_locals:\n"
          "      f.f_globals['send'](f.f_locals['replies'], {'tuple': [\n"
          "          f.f_locals['number'], 'value', {'print': ['passed']}, None]})\n  return []"),
    Cheat("values with one hash", "each",
          "def ordered(x): return {n * (2**61 - 1) for n in range(3000)}"),
    Cheat("changes that are no changes", "apart",
          _REPLIES + _CHANGES.format(None, "7")),
    Cheat("an end before the last call", "each",
          _REPLIES + "\ndef ordered(x):\n  for f in frames():\n"
          "    if 'replies' in f.f_locals:\n      own = f.f_locals\n"
          "      f.f_globals['send'](own['replies'], f.f_globals['encode'](\n"
          "          (own['number'], 'end', None, None)))\n  os._exit(0)"),
]  # fmt: skip
"""Objects that both sides know are changed, or put where they do not belong."""
CHEATS = [*OBJECTS, *READING, *PATCHING, *NAMES, *PROCESS, *SHARING]
