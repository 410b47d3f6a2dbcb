"""Ranks import the user's modules again, and must hold in them what the program held, or nothing starts."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.strategies.launch.programs import Program

pytestmark = pytest.mark.ranks

SETTINGS = """
    import datetime, functools, logging, os, random, threading
    from collections import deque
    from dataclasses import dataclass, field
    from enum import Enum
    from types import SimpleNamespace
    from unittest.mock import call
    import torch
    import torch.nn.functional as F

    LR = 0.1
    LAYERS = [8, 8]
    OPTIONS = {"width": 8, "nested": {"depth": 2}}
    SCALE = 2.0 ** 3
    TWICE = 1
    TWICE = TWICE + 1
    ACTIVATION = F.relu
    SECOND = F.relu
    TABLE = torch.zeros(4)
    OTHER_TABLE = torch.zeros(4)
    RANK = int(os.environ.get("RANK", -1))
    STARTED_AS = os.getpid()
    ON_A_RANK = "RANK" in os.environ
    _cache = None
    REGISTRY = {}
    class Color(Enum):
        RED = 1

    @dataclass
    class Config:
        lr: float = 0.1
        names: list = field(default_factory=list)
        lora_rank: int = 2
        device: torch.device = torch.device("cpu")

    class Replaced:
        dropout = 0.5

    class Net:
        dropout = 0.5
        def width(self):
            return 8
        @property
        def depth(self):
            return 2

    @dataclass(slots=True)
    class Slots:
        lr: float = 0.1

    class Service:
        def __init__(self):
            self.lock, self.connection, self.uses, self.old = threading.Lock(), None, 0, True

    def make(factor):
        def made(x):
            return x * factor
        return made

    def scaled(x):
        return x * scaled.factor
    scaled.factor = 1

    slots, service, connected = Slots(), Service(), Service()
    MADE = make(1)
    LAYER = torch.nn.Linear(2, 1)
    LAYER.log = logging.getLogger()
    CRITERION = torch.nn.MSELoss()
    HUBER = functools.partial(F.huber_loss, delta=1.0)
    WINDOW = deque([1.0], maxlen=4)
    RNG = random.Random(0)
    DATED = {"lr": 0.1, "hosts": range(3), "started": datetime.datetime.now()}
    LORA_RANK = 2

    config = Config()
    space = SimpleNamespace(color=Color.RED, loss=F.mse_loss)

    def loss(x):
        return x

    def uses():
        return LR, SCALE, helper(2)

    def helper(x):
        return x + 1

    def triple(x):
        return 3 * x
"""

OTHER = """
    from settings import RNG, LAYERS, OPTIONS, TWICE as DEPTH, config, loss
    def both():
        return LAYERS, DEPTH, config.lr
"""


Answers = dict[str, tuple[str, str, str]]


@pytest.fixture
def ask(program: Callable[[str], Program], tmp_path: Path) -> Callable[..., tuple[Answers, str]]:
    """Change modules in a program. Returns what each expression gives there before and after, and on a rank; and what
    was said about it."""
    (tmp_path / "settings.py").write_text(textwrap.dedent(SETTINGS))
    (tmp_path / "other.py").write_text(textwrap.dedent(OTHER))

    def run(change: str, *expressions: str, imported: str = "settings, other") -> tuple[Answers, str]:
        source = f"""
            import functools, threading
            import torch, torch.nn.functional as F, {imported}
            from lockstep.strategies.launch.launcher import launch

            def ask():
                import settings, other
                names = dict(settings=settings, other=other, torch=torch, F=F)
                return [repr(eval(expression, names)) for expression in {expressions!r}]

            before = ask() if "other" in globals() else [""] * {len(expressions)}
            CHANGE
            there = launch(ask, (), 2)
            for line in zip({expressions!r}, before, ask(), there):
                print(*line, sep="|")
        """
        source = textwrap.dedent(source).replace("CHANGE", textwrap.dedent(change).strip())
        code, out, err = program(source).finish()
        assert code == 0, err
        lines = [line.split("|") for line in out.splitlines()]
        return {line[0]: (line[1], line[2], line[3]) for line in lines}, err

    return run


CHANGES = {
    "constant": ("settings.LR = 0.5", "settings.LR", "settings.uses()"),
    "added name": ("settings.NEW = {'a': (1, 2.0)}", "vars(settings).get('NEW')"),
    "items of a dict": (
        "settings.OPTIONS['nested']['depth'] = 9; del settings.OPTIONS['width']",
        "settings.OPTIONS",
        "other.OPTIONS",
    ),
    "item of a list": ("settings.LAYERS.append(3)", "settings.LAYERS"),
    "type of a number": ("settings.TWICE = 2.0", "settings.TWICE"),
    "expression": ("settings.SCALE = 3.0", "settings.SCALE"),
    "name in the other file only": ("other.DEPTH = 7", "other.both()"),
    "object's attribute": (
        "settings.config.lr = 0.7; settings.config.names.append('x')",
        "settings.config",
        "other.config.lr, other.config.names",
    ),
    "namespace with functions": ("settings.space.loss = F.l1_loss", "settings.space.loss is F.l1_loss"),
    "class attribute": ("settings.Net.dropout = 0.0", "settings.Net.dropout", "settings.Net().dropout"),
    "content of a tensor": ("settings.TABLE[1] = 2", "settings.TABLE.tolist()"),
    "another tensor": ("settings.OTHER_TABLE = torch.arange(3.0)", "settings.OTHER_TABLE.tolist()"),
    "function of torch": ("settings.ACTIVATION = F.gelu", "settings.ACTIVATION is F.gelu"),
    "lambda in its place": ("settings.SECOND = lambda x: x * 5", "settings.SECOND(torch.tensor(-1.0)).item()"),
    "lambda for a function": ("settings.helper = lambda x: 50 * x", "settings.helper(2)"),
    "imported function": ("other.loss = settings.helper", "other.loss(3)"),
    "function of the program": ("def mine(x):\n    return -x\nsettings.loss = mine", "settings.loss(4)"),
    "wrapped function": (
        "old = settings.triple\n@functools.wraps(old)\ndef more(x):\n    return old(x) + 100\nsettings.triple = more",
        "settings.triple(1)",
    ),
    "method": ("settings.Net.width = lambda self: 99", "settings.Net().width()"),
    "property": ("settings.Net.depth = property(lambda self: 99)", "settings.Net().depth"),
    "class": ("class Mine:\n    dropout = 0.9\nsettings.Replaced = Mine", "settings.Replaced.dropout"),
    "registry": ("settings.REGISTRY['f'] = mine", "sorted(settings.REGISTRY)"),
    "slots": ("settings.slots.lr = 0.5", "settings.slots.lr"),
    "object with a lock": (
        "settings.service.uses, settings.service.new = 3, [1]; del settings.service.old",
        "[item for item in vars(settings.service).items() if item[0] != 'lock']",
    ),
    "function that was made": ("settings.MADE = settings.make(5)", "settings.MADE(2)"),
    "attribute of a function": ("settings.scaled.factor = 3", "settings.scaled(2)"),
    "weights of a layer": ("settings.LAYER.weight.data.fill_(7)", "settings.LAYER.weight.tolist()"),
    "layer with a buffer": (
        "settings.CRITERION = torch.nn.CrossEntropyLoss(weight=torch.ones(2))",
        "getattr(settings.CRITERION, 'weight', None)",
    ),
    "partial function": ("settings.HUBER = functools.partial(F.huber_loss, delta=0.5)", "settings.HUBER.keywords"),
    "deque": ("settings.WINDOW.append(2.0)", "settings.WINDOW"),
    "generator": (
        "settings.RNG.random()",
        "settings.RNG.getstate()[1][-1]",
        "settings.RNG is other.RNG, other.RNG.getstate()[1][-1]",
    ),
    "dict with a date": ("settings.DATED['lr'] = 0.5", "settings.DATED"),
    "name with rank": ("settings.LORA_RANK = 8", "settings.LORA_RANK"),
    "attribute with rank": ("settings.config.lora_rank = 8", "settings.config.lora_rank"),
    "function of a package": ("F.relu6 = lambda x: x * 3", "F.relu6(torch.tensor(-1.0)).item()"),
    "method of a package": (
        "torch.nn.Linear.reset_parameters = lambda self: torch.nn.init.constant_(self.weight, 3)",
        "torch.nn.Linear(1, 1).weight.item()",
    ),
}


@pytest.mark.long
def test_a_rank_holds_what_the_program_changed(ask: Callable[..., tuple[Answers, str]]) -> None:
    change = "\n".join(change for change, *_ in CHANGES.values())
    answers, said = ask(change, *[expression for _, *expressions in CHANGES.values() for expression in expressions])
    assert not said
    for name, (_, *expressions) in CHANGES.items():
        for expression in expressions:
            before, here, there = answers[expression]
            assert here == there != before, (name, expression)


@pytest.mark.long
def test_what_is_imported_later_is_changed_too(ask: Callable[..., tuple[Answers, str]]) -> None:
    change = "import settings\nsettings.LR, settings.config.lr, settings.SCALE = 0.5, 0.25, 1.5"
    answers, _ = ask(change, "settings.uses()", "other.both()", imported="os")
    assert answers["settings.uses()"] == ("", "(0.5, 1.5, 3)", "(0.5, 1.5, 3)")
    assert answers["other.both()"] == ("", "([8, 8], 2, 0.25)", "([8, 8], 2, 0.25)")


@pytest.mark.long
def test_a_rank_keeps_what_is_its_own(ask: Callable[..., tuple[Answers, str]]) -> None:
    answers, _ = ask("settings.LR = 0.5", "settings.RANK", "settings.STARTED_AS", "settings.ON_A_RANK", "settings.LR")
    assert answers["settings.RANK"] == ("-1", "-1", "0")
    assert answers["settings.ON_A_RANK"] == ("False", "False", "True")
    assert answers["settings.STARTED_AS"][1] != answers["settings.STARTED_AS"][2]
    assert answers["settings.LR"] == ("0.1", "0.5", "0.5")


@pytest.mark.long
def test_a_cache_that_cannot_be_sent_is_filled_on_the_rank(ask: Callable[..., tuple[Answers, str]]) -> None:
    answers, said = ask("settings._cache = threading.Lock()", "settings._cache is None")
    assert answers["settings._cache is None"] == ("True", "False", "True") and not said
    answers, said = ask("settings._cache = threading.Lock()\nsettings.LR = 0.5", "settings.LR")
    assert answers["settings.LR"] == ("0.1", "0.5", "0.1")
    assert "without the changes to settings.LR, because settings._cache cannot be sent to them" in said


@pytest.mark.long
def test_data_of_an_open_connection_stays_with_it(ask: Callable[..., tuple[Answers, str]]) -> None:
    """A rank has no connection, and would not open one if it held that it is open."""
    change = "settings.connected.connection, settings.connected.uses = threading.Lock(), 1"
    answers, said = ask(change, "settings.connected.uses")
    assert answers["settings.connected.uses"] == ("0", "1", "0") and not said


def test_a_replacement_that_cannot_be_sent_is_refused(program: Callable[[str], Program], tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text(textwrap.dedent(SETTINGS))
    code, out, err = program("""
        import settings, threading
        from lockstep.strategies.launch.launcher import launch

        def closing(lock):
            return lambda x: lock
        settings.helper = closing(threading.Lock())
        launch(print, (), 2)
    """).finish()
    assert code == 1 and not out
    assert "settings.helper was replaced since its file was imported" in err.splitlines()[-1]


def test_what_cannot_be_made_of_its_pickle_is_named(program: Callable[[str], Program], tmp_path: Path) -> None:
    refused = "class Refused(Exception):\n    def __init__(self, name, why):\n        super().__init__(name + why)\n"
    (tmp_path / "own.py").write_text(f"{refused}LR = 0.1\nlast = None\nmore = None\n")
    code, out, err = program("""
        import own
        from lockstep.strategies.launch.launcher import launch

        def ask():
            import own
        own.LR, own.last, own.more = 0.5, own.Refused("a", "b"), 1
        launch(ask, (), 2)
    """).finish()
    assert code == 1 and not out
    assert "own.last was changed since its file was imported, and ranks import the file again, but what is there" in err


@pytest.mark.long
def test_what_is_installed_into_a_folder_is_a_package(program: Callable[[str], Program], tmp_path: Path) -> None:
    """As by `pip install --target`: its modules fill themselves, also with what no rank could take over."""
    record = tmp_path / "libs" / "library-1.0.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("library.py,,\nlibrary-1.0.dist-info/RECORD,,\n")
    for name in ("library", "own"):
        (tmp_path / "libs" / f"{name}.py").write_text("SIZES = {}\nLR = 0.1\n")
    code, out, err = program("""
        import sys
        sys.path.insert(0, "libs")
        import library, own
        from lockstep.strategies.launch.launcher import launch

        def ask():
            import library, own
            return library.SIZES, own.LR
        library.SIZES[type(sys.float_info)] = 8
        own.LR = 0.5
        print(launch(ask, (), 2))
    """).finish()
    assert (code, out) == (0, "({}, 0.5)\n"), err


EDITS = {
    "body": (("x + 1", "x + 2"), "more is another one"),
    "method": (("return 8", "return 9"), "Net.width is another one"),
    "removed": (("def more", "def less"), "more is another one"),
    "comment": (("def more", "# longer by a line\n\ndef more"), ""),
    "constant": (("LR = 0.1", "LR = 0.5"), ""),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", EDITS)
def test_a_file_that_was_edited_since_its_import_is_refused(
    program: Callable[[str], Program], tmp_path: Path, kind: str
) -> None:
    """Ranks would run the new code, and one process runs the old."""
    edit, refused = EDITS[kind]
    source = "LR = 0.1\nclass Net:\n    def width(self):\n        return 8\n\ndef more(x):\n    return x + 1\n"
    (tmp_path / "layers.py").write_text(source)
    code, out, err = program(f"""
        import layers
        from pathlib import Path
        from lockstep.strategies.launch.launcher import launch

        def ask():
            import layers
            return layers.LR, layers.Net().width(), layers.more(1)
        Path("layers.py").write_text(Path("layers.py").read_text().replace(*{edit!r}))
        print(launch(ask, (), 2))
    """).finish()
    if refused:
        assert code == 1 and "layers.py was edited after this program imported it" in err.splitlines()[-1]
        assert refused in err.splitlines()[-1]
    else:
        assert (code, out) == (0, "(0.1, 8, 2)\n"), err
