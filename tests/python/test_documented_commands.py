"""Every command of the README, docs/, the pages of results and `make help`, and every option that `--help` lists.

The list of commands comes from the pages (documented.py). A command of `remap` or `python -m bench.lab` is run with its
smallest load, in a folder that has what it reads (`FILES`); what cannot run here says why (`Tried.parsed`, `NOT_HERE`), and
its real parser still reads the words. A command for which there is neither fails with its page and line. So does an option
that no run of `TRIED` names, and one that a page names and the commands of that page do not have.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import documented
import pytest
from documented import ROOT, Command
from effort import LONG

typer = pytest.importorskip("typer", reason="the command line needs typer")
pytest.importorskip("scipy", reason="`remap fit` needs scipy, of the extra `sim`")

from bench.gpu import __main__ as gpu  # noqa: E402
from bench.gpu.vllm import pack  # noqa: E402
from bench.lab.commands import app as lab  # noqa: E402
from subprocesses import load_tool  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from remap.cli.main import app as ours  # noqa: E402

APPS = {("remap",): ours, ("python", "-m", "remap"): ours, ("python", "-m", "bench.lab"): lab}


@dataclass(frozen=True)
class Tried:
    """How a command is tried.

    runs: lines that name every option between them, with the smallest load; one after the other, in one folder. small: what
    makes a documented line as small; a later option counts. needed: of a line in a sentence, what it leaves out. parsed: why
    nothing runs here, and what runs it. ends: exit codes that are right.
    """

    runs: tuple[str, ...]
    small: str = ""
    needed: str = ""
    parsed: str = ""
    ends: tuple[int, ...] = (0,)


def _resumed(name: str, quick: bool = True) -> tuple[str, ...]:
    """Of a stored result that lacks one run."""
    more = "--quick " if quick else ""
    return (f"{more}--jobs 1 --results {name}.json", f"{more}--report-only --results {name}.json")


TRIED = {
    "remap": Tried(("--version",)),
    "remap demo": Tried(
        (
            # float32, whose weights the model's own tests have made: not every processor multiplies bfloat16 in hardware.
            "--memory 640MiB --dtype float32 --requests 1 --max-num-seqs 2 --max-batch-tokens 64 --block-tokens 16 "
            "--threads 1 --rounds 1 --out out",
            "--tenants 2 --dtype float32 --requests 1 --out out --json",
        ),
        small="--requests 1 --out out",
    ),
    "remap offline": Tried(
        (
            "--model MODEL --memory 16MiB --max-num-seqs 2 --max-batch-tokens 64 requests.jsonl answers.jsonl",
            "--model MODEL --host-kv 4MiB --ratio 0:1 --json requests.jsonl others.jsonl",
        )
    ),
    "remap cluster": Tried(()),
    "remap cluster serve": Tried(
        (
            "--model MODEL --instances 2 --memory 3MiB --host-kv 1MiB --policy pipeline --host 127.0.0.1 --port 0 --threads 1 "
            "--max-num-seqs 4 --max-batch-tokens 64 --bandwidth 1GB --latency-ms 0.5 --max-body 1MiB --max-requests 8 "
            "--deadline 600 --grace 5 --allow-host box --access-log --log-level info",
            "--model MODEL --address auto --shared many --ahead",
            "--model MODEL --engine vllm --engine-args '{\"max_model_len\": 64}'",
        ),
        parsed="it serves until it is interrupted: test_cluster_command.py runs the first line. --address needs a Ray that "
        "somebody started (test_cluster_shared.py has one), --engine vllm needs vLLM (tests/engines/vllm/test_cluster.py has its "
        "instances)",
    ),
    "remap serve-many": Tried(
        (
            "a=MODEL b=MODEL --memory 3MiB --device cpu --ttft 10 --tbt 1 --quantum 0.5 --host 127.0.0.1 --port 0 --threads 1 "
            "--max-num-seqs 4 --max-batch-tokens 64 --max-body 1MiB --max-requests 8 --deadline 60 --grace 5 --allow-host box "
            "--access-log --log-level info",
        ),
        parsed="it serves until it is interrupted: test_serve_many.py runs it with these options",
    ),
    "remap serve": Tried(
        ("--socket out/s --capacity 8MiB --page-bytes 64KiB --device cpu --metrics 0",),
        parsed="it serves until it is interrupted: test_broker.py runs it",
    ),
    "remap top": Tried(
        ("--once --url URL", "--json --url URL", "--once --socket SOCKET"), small="--once --socket SOCKET"
    ),
    "remap trace": Tried(("--socket SOCKET --seconds 0 trace.json",), small="--socket SOCKET --seconds 0"),
    "remap plan": Tried(
        (
            "--machine my-machine --model MODEL --memory 40% --context 64 --batch 4 --donors Llama-3-8b --max-num-seqs 16 "
            "--dtype bf16 --tp 2 --tables mine.json --json",
        ),
        needed="--model OPT-13b",
    ),
    "remap simulate": Tried(
        (
            "--machine my-machine --models half --arrivals poisson --lengths fixed:40:7 --rate 30 --requests 12 --policies "
            "recompute,remap,ideal --sharing spatial --scheduler chunked --seed 1 --quantum 0.5 --ttft-target 1 "
            "--tpot-target 0.1 --tables mine.json --json --html out.html",
        ),
        small="--requests 12",
        needed="--models C1",
    ),
    "remap advise": Tried(
        (
            "--machine my-machine --models Llama-3-8b --rate 4 --memory 40% --lengths fixed:40:7 --arrivals poisson "
            "--sharing spatial --requests 20 --seeds 1 --tables mine.json --json --html out.html",
        ),
        small="--requests 20 --seeds 1",
    ),
    "remap fit": Tried(("measured.json --name my-machine --out fitted.json --like A100 --json",)),
    "remap doctor": Tried(("--json", "--vllm"), ends=(0, 1)),  # 1: something is bad, such as vLLM that is not installed
    "bench.lab": Tried(()),
    "bench.lab machine": Tried(
        ("--out found.json --device cpu --dtype float32 --quick --threads 1",), small="--out found.json --quick"
    ),
    "bench.lab paper": Tried(
        (
            "--only fig4 --quick --requests 20 --seeds 1 --jobs 1 --again --results paper.json --page paper.md",
            "--report-only --results paper.json --page paper.md",
        )
    ),
    "bench.lab four-papers": Tried(("--page page.md",)),
    "bench.lab beyond": Tried(("--page page.md --report-only",)),
    "bench.lab headline": Tried(_resumed("headline", quick=False)),
    "bench.lab gap": Tried(_resumed("gap")),
    "bench.lab knee": Tried(_resumed("knee")),
    "bench.lab market": Tried(
        ("--quick --jobs 1 --results market.json", "--quick --report-only --results market.json"), small="--quick"
    ),
    "bench.lab trades": Tried(_resumed("trades")),
    "bench.lab regret": Tried(
        (
            "--quick --loads 1 --jobs 1 --results regret.json",
            "--quick --loads 1 --report-only --results regret.json",
        )
    ),
    "bench.lab map": Tried(_resumed("map")),
    "bench.lab pie": Tried(_resumed("pie")),
    "bench.lab hybridserve": Tried(_resumed("hybridserve")),
    "bench.lab kunserve": Tried(_resumed("kunserve")),
    "bench.lab kunserve-map": Tried(_resumed("kunserve-map")),
    "bench.lab ablations": Tried(
        ("--only recompute --quick --seconds 1 --runs 1 --out out",), small="--quick --seconds 1 --runs 1 --out out"
    ),
    "bench.lab real": Tried(
        ("--quick --report-only --results real.json", "--turns --report-only --results turns.json"),
        parsed="test_lab_real.py runs it with --quick",
    ),
    "bench.lab offline": Tried(
        ("--quick --report-only --results offline.json",), parsed="test_lab_offline.py runs it with --quick"
    ),
    "bench.lab broker": Tried(
        ("--quick --results broker.json", "--quick --report-only --results broker.json"),
        parsed="it measures for half a minute: test_lab.py runs it with --quick",
    ),
    "bench.lab cluster": Tried(
        ("--quick --report-only --results cluster.json", "--duel --report-only --results duel.json"),
        parsed="test_lab_cluster.py makes a run of --quick and the page",
    ),
    "bench.lab twin": Tried(
        ("--out out",), parsed="two runs of the demo, of minutes: test_lab_twin.py makes small ones"
    ),
    "bench.lab vllm": Tried(
        (
            "--model MODEL --kv 1MiB --seconds 1 --runs 1 --threads 1 --load edge --host-kv 1MiB --cpu-linear exact --out out",
        ),
        parsed="it needs vLLM, and minutes",
    ),
}
SLOW = {"remap demo", "remap simulate", "remap advise", *(name for name in TRIED if name.startswith("bench.lab "))}
TYPERS_OWN = {"--install-completion", "--show-completion"}  # they change the user's shell

ELSEWHERE = {
    *("--mem-fraction-static", "--max-total-tokens", "--enable-hierarchical-cache"),  # SGLang's
    *("--page-size", "--disable-hybrid-swa-memory"),  # and these
    "--no-deps",  # pip's
    "--node-ip-address",  # Ray's
    *(
        "--additional-config",
        "--cpu-offload-gb",
        "--gpu-memory-utilization",
        "--enable-eplb",
        "--enable-elastic-ep",
        "--enable-sleep-mode",
        "--goodput",
    ),
    *(
        "--kv-cache-dtype",
        "--kv-offloading-size",
        "--kv-transfer-config",
        "--num-gpu-blocks-override",
        "--scheduling-policy",
        "--disable-hybrid-kv-cache-manager",
        "--offload-group-size",
        "--model-impl",
        "--limit-mm-per-prompt",
        "--speculative-config",
        "--attention-backend",
    ),  # these are vLLM's
}
"""Options of other programs that pages name."""

COMMANDS = tuple(documented.commands())
LIMIT_S = 300.0


# -- what commands read -----------------------------------------------------------------------------------------------
def save_model(path: Path, layers: int = 4) -> None:
    """A random Llama with a tokenizer, and so many tokens that the prompts of docs/offline.md are some."""
    torch = pytest.importorskip("torch", reason="models need torch and transformers")
    transformers = pytest.importorskip("transformers", reason="models need torch and transformers")
    from cluster_folder import byte_tokenizer

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=4096,
        num_hidden_layers=layers,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=256,
        **shape,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)


def write_requests(path: Path) -> None:
    """Those of the page."""
    given, _ = (block.text for block in documented.blocks(ROOT / "docs/offline.md") if block.kind == "json")
    path.write_text(given, encoding="utf-8")


def _measured(path: Path) -> None:
    from test_sim_fit import measured

    from remap.policy.hardware import machine

    path.write_text(json.dumps(measured(machine("GH200-96GB"))), encoding="utf-8")


def _tables(path: Path) -> None:
    given = {
        "machines": {"my-machine": {"like": "GH200-96GB"}},
        "models": {"half": {"like": "Llama-3-8b", "layers": 16}},
    }
    path.write_text(json.dumps(given), encoding="utf-8")


def _lacking(module: str) -> Callable[[Path], None]:
    """The stored result as of --quick, where there is that, without one of its runs."""

    def make(path: Path) -> None:
        command = importlib.import_module(f"bench.lab.{module}")
        data = json.loads(command.RESULTS.read_text(encoding="utf-8"))
        names = list(data["points"])
        if hasattr(command, "QUICK"):
            data["settings"] = command.empty(command.QUICK)["settings"]
            names = list(command.runs(command.QUICK)) if hasattr(command, "runs") else names
        del data["points"][next(name for name in names if name.endswith("0"))]
        path.write_text(json.dumps(data), encoding="utf-8")

    return make


FILES: Mapping[str, Callable[[Path], None]] = {
    "MODEL": save_model,
    "requests.jsonl": write_requests,
    "measured.json": _measured,
    "mine.json": _tables,
    "headline.json": _lacking("headline"),
    "gap.json": _lacking("gap"),
    "trades.json": _lacking("trades"),
    "pie.json": _lacking("pie.command"),
    "hybridserve.json": _lacking("hybridserve.command"),
    "kunserve.json": _lacking("kunserve.command"),
}


def serving() -> AbstractContextManager[str]:
    """Something that answers as a cluster does: its address."""
    from test_cluster_command import PAGE_OF_GROUPS, answering  # it says itself what it needs

    return answering(json.dumps(PAGE_OF_GROUPS).encode())


@contextmanager
def sharing(folder: Path) -> Iterator[str]:
    """A broker: its socket."""
    pytest.importorskip("msgspec", reason="messages between processes need msgspec")
    from remap.broker.server import Broker

    with Broker(folder / "socket", 1 << 20, 1 << 16) as broker:
        yield str(broker.path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, empty; what a command sets in the environment ends with the test."""
    monkeypatch.chdir(tmp_path)
    with patch.dict(os.environ, {"COLUMNS": "200", "HF_HUB_OFFLINE": "1"}):
        yield tmp_path


# -- parsers ----------------------------------------------------------------------------------------------------------
@cache
def command_of(app: Any) -> Any:
    """To look at: `read` changes one that it makes for itself."""
    return typer.main.get_command(app)


def found_in(app: Any, words: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The command that the words lead to, and its names."""
    command, names = command_of(app), []
    while len(names) < len(words) and words[len(names)] in getattr(command, "commands", {}):
        names.append(words[len(names)])
        command = command.commands[names[-1]]
    return command, names


def options_of(command: Any) -> set[str]:
    """Its long options."""
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("--")}


def all_commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for below, one in getattr(command, "commands", {}).items():
        yield from all_commands(f"{name} {below}", one)


EVERY = dict((*all_commands("remap", command_of(ours)), *all_commands("bench.lab", command_of(lab))))


def read(app: Any, words: tuple[str, ...]) -> None:
    """Only parse them. Raises the parser's own error."""
    root = command = typer.main.get_command(app)
    for name in found_in(app, words)[1]:
        command = command.commands[name]
    command.callback = lambda **given: None
    root.main(list(words), prog_name="command", standalone_mode=False)


@contextmanager
def demo_in_this_process() -> Iterator[None]:
    """Runs of the demo without their processes, which load torch anew. One keeps its own, as users see it: of one model with
    remap (in the long form all of one model). Of several models those beside SmolLM2 are small, and answers are short; in the
    long form both are the demo's.
    """
    from remap_serve.cli import demo, demo_requests, demo_run, demo_tenants
    from remap_serve.cli.shared_world import LARGE, SMALL

    apart = demo.run_in_process

    def here(kind: str, config: Any, on_progress: Any) -> Any:
        if config.tenants == 1 and (LONG or kind == "remap"):
            return apart(kind, config, on_progress)
        few = config.tenants > 1 and not LONG
        prompts = [replace(each, max_tokens=8) for each in demo_requests.PROMPTS] if few else demo_requests.PROMPTS
        with patch.object(demo_requests, "PROMPTS", prompts):
            return None if kind == "prepare" else demo_run.run_one(kind, config, on_progress)

    models = LARGE if LONG else replace(LARGE, models=(LARGE.models[0], *SMALL.models[1:]))
    with patch.object(demo, "run_in_process", here), patch.object(demo_tenants, "LARGE", models):
        yield


def run(app: Any, words: tuple[str, ...], folder: Path, ends: tuple[int, ...]) -> None:
    """Run them in the folder; the exit code is one of `ends`, and no exception leaves the command."""
    for word in words:
        if word in FILES and not (folder / word).exists():
            FILES[word](folder / word)
    with (
        serving() if "URL" in words else nullcontext("") as url,
        sharing(folder) if "SOCKET" in words else nullcontext("") as path,
        demo_in_this_process() if words[:1] == ("demo",) else nullcontext(),
    ):
        found = CliRunner().invoke(app, [word.replace("URL", url).replace("SOCKET", path) for word in words])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code in ends, f"{shlex.join(words)}\n{found.output}"


def ours_of(command: Command) -> tuple[Any, tuple[str, ...], str] | None:
    """The application, its words, and the name in TRIED; None for other programs."""
    for begins, app in APPS.items():
        if command.words[: len(begins)] == begins:
            words = command.words[len(begins) :]
            names = found_in(app, words)[1]
            return app, words, " ".join((begins[-1], *names))
    return None


def line_of(command: Command, app: Any, tried: Tried, words: tuple[str, ...]) -> tuple[str, ...]:
    """A documented line as it is read: whole."""
    names = words[: len(found_in(app, words)[1])]
    if not command.whole and words == names:
        return (*words, "--help")  # a sentence names it
    cut = words[-1:] == ("...",)
    needed = shlex.split(tried.needed) if cut or not command.whole else ()
    return (*names, *needed, *words[len(names) : len(words) - cut])


# -- other programs: why nothing of them runs here, and what is looked at instead ---------------------------------------
class _Parsed(Exception):
    pass


def _read_argparse(main: Callable[[], object], words: tuple[str, ...]) -> None:
    """Call `main` with these words until its parser has read them. Raises SystemExit if it cannot."""
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: Any) -> None:
        real(self, *given)
        raise _Parsed

    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse),
        patch.object(sys, "argv", list(words)),
        pytest.raises(_Parsed),
    ):
        main()


def _gpu(command: Command) -> None:
    _read_argparse(gpu.main, command.words)


def _make(command: Command) -> None:
    """make says what it would do; what is ours in that has to be readable, too."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # Not the flags of the make that may have started this.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    done = subprocess.run(
        ["make", "--dry-run", *command.words[1:]], cwd=ROOT, env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    for line in re.sub(r"\S*bin/(python|remap) ", r"\1 ", done.stdout.replace("\\\n", " ")).splitlines():
        if line.startswith(("remap ", "python -m bench.lab ", "bench/gpu/run.sh ", "python tools/")):
            words = tuple(shlex.split(line.partition(" >")[0]))
            found = ours_of(Command(str(command), words))
            if found is not None:
                read(*found[:2])
            elif words[0] == "python":
                tool = load_tool(Path(words[1]).stem)
                if hasattr(tool, "argparse"):
                    _read_argparse(tool.main, words[1:])
            else:
                _read_argparse(gpu.main, words)


def _pip(command: Command) -> None:
    """Extras are those of pyproject.toml, versions those of the Makefile."""
    requirements = pytest.importorskip("packaging.requirements", reason="packaging is not installed")
    read = load_tool("extras").tomllib.loads
    pinned = re.findall(r"[\w-]+==[\w.]+", documented.MAKEFILE.read_text(encoding="utf-8"))
    does, *what = (word for word in command.words[1:] if word not in ("-y", "--no-deps"))
    if "--extra-index-url" in what:
        del what[at := what.index("--extra-index-url")]
        assert what.pop(at) == load_tool("torch_index").CPU_INDEX, command
    for each in what:
        if each.startswith("."):
            folder, _, named = each.rstrip("]").partition("[")
            extras = read((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"][
                "optional-dependencies"
            ]
            assert set(filter(None, named.split(","))) <= set(extras), f"{command}: there are {', '.join(extras)}"
            continue
        name = requirements.Requirement(each).name
        assert name != "remap", f"{command}: no index has it; in a clone it is '.'"
        known = [one for one in pinned if one.startswith(f"{name}==")]
        assert does == "uninstall" or known == [each], f"{command}: the Makefile has {known}"


def _engine(command: Command) -> None:
    """Names of ours among the arguments are there; the adapters or the engines' tests know the others, as flags or keywords."""
    for word in command.words:
        if word.startswith("remap."):
            module, _, name = word.rpartition(".")
            assert name in importlib.import_module(module).__all__, command
    folders = (ROOT / "tests/engines", ROOT / "src/remap/adapters")
    known = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    for option in (word for word in command.words if word.startswith("--")):
        assert option in known or option[2:].replace("-", "_") in known, f"{command}: {option}"


def _example(command: Command) -> None:
    assert (ROOT / command.words[1]).is_file(), command


def _ray(command: Command) -> None:
    cli = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed").cli
    with patch.object(cli.commands[command.words[1]], "callback", lambda **given: None):
        cli.main([word.replace("FIRST", "127.0.0.1") for word in command.words[1:]], standalone_mode=False)


def _export(command: Command) -> None:
    """Ray reads these variables."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    package = Path(ray.__file__).parent
    sources = (package / "exceptions.py", *(package / "_private/authentication").glob("*.py"))
    known = "".join(path.read_text(encoding="utf-8") for path in sources)
    for word in command.words[1:]:
        assert word.partition("=")[0] in known, command


def _cmake(command: Command) -> None:
    """Folders of sources are there, and `make cpp-example` runs the example with the same arguments."""
    first, *arguments = command.words
    for flag, folder in zip(arguments, arguments[1:]):
        assert flag != "-S" or (ROOT / folder / "CMakeLists.txt").exists(), command
    if first != "cmake":
        recipe = documented.MAKEFILE.read_text(encoding="utf-8").splitlines()
        run = shlex.join((f"build/example/{Path(first).name}", *arguments))
        assert any(line.strip().endswith(run) for line in recipe), f"{command}: make cpp-example has no {run}"


def _pytest(command: Command) -> None:
    """The files are there, and what -k names is in the name of one of their tests."""
    assert f"VENV := {command.words[0].partition('/')[0]}\n" in documented.MAKEFILE.read_text(encoding="utf-8")
    words = command.words[3:]
    files = [ROOT / word for word in words if word.endswith(".py")]
    assert files and all(path.is_file() for path in files), command
    for flag, word in zip(words, words[1:]):
        text = "".join(path.read_text(encoding="utf-8") for path in files)
        assert flag != "-k" or re.search(rf"^def test_\w*{word}", text, re.MULTILINE), command


def _kills(command: Command) -> None:
    """KILLS and RESULT, and shared, which its main reads as they stand."""
    kills = pytest.importorskip("bench.lab.cluster.kills", reason="needs the extras cluster and transformers")
    from bench.lab.cluster import shared

    count, path, *more = command.words[3:]
    where, name = (shared, "run_shared") if more == ["shared"] else (kills, "run")
    with patch.object(where, name, lambda number: {"kills": number}):
        kills.main([count.replace("N", "3"), path, *more])
    assert json.loads(Path(path).read_text(encoding="utf-8")) == {"kills": 3}


def _bench(command: Command) -> None:
    """Its own parser reads its words, and shows its help."""
    words = command.words[2:] if command.words[1] == "-m" else command.words[1:]
    module = importlib.import_module(
        f"{words[0]}.__main__" if command.words[1] == "-m" else words[0].removesuffix(".py").replace("/", ".")
    )
    with patch.object(sys, "argv", [*words, "--help"]), pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0


def _pack(command: Command) -> None:
    pack.parser().parse_args(command.words[3:])


def _alone(command: Command) -> None:
    """A module without options."""
    assert importlib.import_module(command.words[2]) and not command.words[3:], command


def _tool(command: Command) -> None:
    """A file without options."""
    assert (ROOT / command.words[1]).exists() and not command.words[2:], command


NOT_HERE: Mapping[str, tuple[str, Callable[[Command], None]]] = {
    "make ": ("suites, builds and measurements of minutes to hours; the commands in recipes are tried above", _make),
    "bench/gpu/run.sh": ("it needs a GPU; tests/gpu makes its calls on the emulated driver", _gpu),
    "python -m bench.gpu.vllm.pack": ("it downloads 400 MB; test_vllm_pack.py has its parts", _pack),
    "python tools/runs.py": ("it writes a page, which test_runs.py compares", _tool),
    "python -m bench.gpu.vllm_predictions": (
        "it simulates for a minute; tests/gpu/test_bench_predictions.py has its parts",
        _alone,
    ),
    "python -m bench.lab.cluster.kills": (
        "a kill takes seconds; test_cluster_command.py kills one that serves",
        _kills,
    ),
    "python -m bench.processes": ("its servers serve for minutes", _bench),
    "python bench/cold_models.py": ("it serves for a minute at least", _bench),
    ".venv/bin/python -m pytest ": ("the suite itself", _pytest),
    "python examples/": (
        "test_examples.py runs the examples, test_example.py of the engines the one of vLLM",
        _example,
    ),
    "pip ": ("it changes the environment", _pip),
    "vllm ": ("it needs vLLM: make test-engines", _engine),
    "python -m vllm": ("it needs vLLM: make test-engines", _engine),
    "python -m sglang": ("it needs SGLang: make test-engines", _engine),
    "ray start": ("it starts a Ray for the whole machine", _ray),
    "export RAY_": ("of the shell and of Ray", _export),
    "cmake ": ("make cpp-example builds and installs the same", _cmake),
    "build/example-engine/": ("make cpp-example runs it", _cmake),
}


# -- tests ------------------------------------------------------------------------------------------------------------
def slow(name: str) -> tuple[Any, ...]:
    return (pytest.mark.slow,) if name in SLOW else ()


def runs(name: str) -> bool:
    """Whether its lines run here. The experiments' do in the long form: tests/lab runs what they call."""
    return not TRIED[name].parsed and (LONG or name.startswith("remap"))


def name_of(command: Command) -> str:
    found = ours_of(command)
    return found[2] if found else ""


@pytest.mark.parametrize("command", [pytest.param(one, marks=slow(name_of(one)), id=str(one)) for one in COMMANDS])
def test_a_documented_command_runs_or_is_read_by_its_parser(command: Command, folder: Path) -> None:
    found = ours_of(command)
    if found is None:
        text = " ".join(command.words)
        begins = max((each for each in NOT_HERE if text.startswith(each)), key=len, default="")
        assert begins, f"{command}: nothing tries it; add how to TRIED, or why not to NOT_HERE"
        NOT_HERE[begins][1](command)
        return
    app, words, name = found
    assert name in TRIED, f"{command}: nothing tries it; add how to TRIED"
    line = line_of(command, app, TRIED[name], words)
    read(app, line)
    if runs(name):
        run(app, line if line[-1] == "--help" else (*line, *shlex.split(TRIED[name].small)), folder, TRIED[name].ends)


@pytest.mark.parametrize("name", EVERY)
def test_every_option_of_a_command_is_tried(name: str) -> None:
    assert name in TRIED, f"{name}: nothing tries it; add how to TRIED"
    named = {word for line in TRIED[name].runs for word in shlex.split(line) if word.startswith("--")}
    assert named == options_of(EVERY[name]) - TYPERS_OWN


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow(name)) for name in TRIED])
def test_a_command_runs_with_its_options(name: str, folder: Path) -> None:
    app, tried = (ours if name.startswith("remap") else lab), TRIED[name]
    for line in tried.runs:
        words = (*name.split()[1:], *shlex.split(line))
        read(app, words)
        if runs(name):
            run(app, words, folder, tried.ends)


def test_what_is_tried_exists() -> None:
    """No entry outlives its command or its sentence."""
    assert set(TRIED) == set(EVERY)
    texts = [" ".join(each.words) for each in COMMANDS]
    assert [each for each in NOT_HERE if not any(text.startswith(each) for text in texts)] == []


def test_a_block_says_what_it_is() -> None:
    """Commands are found by the mark `sh`."""
    kinds = {"sh", "text", "python", "json", "yaml", "cmake", "cpp"}
    assert [
        str(block) for page in documented.PAGES for block in documented.blocks(page) if block.kind not in kinds
    ] == []


@pytest.mark.parametrize("page", documented.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_an_option_in_a_sentence_is_one_of_a_command_of_that_page(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.read_text(encoding="utf-8")
    known = set(ELSEWHERE).union(*(options_of(command) for name, command in EVERY.items() if name in text))
    if "bench/gpu/run.sh" in text:
        with pytest.raises(SystemExit):
            gpu.main(["--help"])
        known.update(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    for code in documented.inline(page):
        for option in re.findall(r"(?:^|(?<=\s))--[a-z][\w-]*", code.text):
            assert option in known or ours_of(Command("", tuple(code.text.split()))), str(code)
