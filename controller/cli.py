"""The command line: `kilburn serve | controller | worker | gateway | plan | simulate | tune | top | ...`; see COMMANDS.

A command is a row of COMMANDS: what it is for, and a function from its words to an exit status. Statuses: 0 well, 1
something failed on the way, 2 a setting must change. The worker is another program (`python -m kilburn.worker`): it is
started, never imported, so that nothing here waits for torch; and a fault in the settings is told before anything is
loaded.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kilburn.controller.version import version
from kilburn.shared import logs
from kilburn.shared.config import (
    ControllerSettings,
    GatewaySettings,
    HealthSettings,
    PlanSettings,
    ProvisionSettings,
    ServeSettings,
    SettingsError,
    SimulateSettings,
    TopSettings,
    TuneSettings,
    WorkerSettings,
    as_flags,
    complain,
    load_or_exit,
)
from kilburn.shared.keys import SettingError, default_name
from kilburn.shared.kinds import nearest
from kilburn.shared.model_files import BUNDLED_NAME, ModelRefused

ABOUT_SERVE = """Serve a model over an OpenAI-compatible REST API: starts a controller (this process) and a worker,
prints the address and a curl line, restarts the worker if it dies, and stops everything on Ctrl-C."""
ABOUT_CONTROLLER = (
    "The process that decides: REST API, queue, scheduler. Workers connect to it; it never touches a tensor."
)
ABOUT_WORKER = "The process that computes: loads a model and runs the plans of the controller that it connects to."
ABOUT_GATEWAY = """One address before several controllers: a request goes to the one that has computed most of its
prompt and is least busy, and to another if that one fails before the first token. Keeps nothing."""
ABOUT_PLAN = """What a worker would make of a device's memory: weights, what steps need, KV blocks, sequences. Needs no
accelerator and loads no weights: config.json and the headers of safetensors or GGUF files are read."""
ABOUT_SIMULATE = """How a cluster that does not exist would serve a trace, or requests that come at random: the
production scheduler on a virtual clock, over devices whose steps take as long as a roofline says (or as was measured on
one). Every combination of rates, groups, block sizes and policies is a run."""
ABOUT_TUNE = """usage: kilburn tune block-size MODEL --trace FILE [--setting value ...]

Runs a trace, or requests that come at random, over blocks of every size, and recommends one. Settings are those of
`kilburn simulate`, and --within-percent; `kilburn tune block-size --help` lists them."""
ABOUT_TOP = (
    "What a running server's memory and requests look like, in this terminal; the page at its address shows the same."
)
ABOUT_PROVISION = """Makes what the services of compose.yaml need before their first start: a model that is ready, and
every key, in a folder for each service. Secrets and lines of api.keys that are there already stay as they are."""
ABOUT_HEALTH = "Asks a server how it is, and ends with status 0 where it is well: for probes of containers."
ABOUT_KEYS = """usage: kilburn keys new FOLDER [WORKER ...]

Makes the keys that let workers connect from other machines: controller.key and workers.allow for the controller, and
one NAME.key for each worker named (worker-0 if none is). Nothing is overwritten; only you can read the files."""


def serve(words: Sequence[str]) -> int:
    settings = load_or_exit(ServeSettings, words, "kilburn serve", ABOUT_SERVE, "model")
    logs.set_up(settings.log_level, settings.log_format)
    from kilburn.controller.serve import run_serve

    return run_serve(settings)


def controller(words: Sequence[str]) -> int:
    settings = load_or_exit(ControllerSettings, words, "kilburn controller", ABOUT_CONTROLLER, "model")
    logs.set_up(settings.log_level, settings.log_format)
    from kilburn.controller.app import Running, run_controller
    from kilburn.controller.prepared import prepared_folder, public_name

    def tell(running: Running) -> None:
        print(
            f"{running.model_name}: REST at {running.http_address}, workers connect to {running.endpoint}", flush=True
        )

    name = settings.served_model_name or public_name(settings.model)
    folder = prepared_folder(settings.model, settings.revision)
    asyncio.run(run_controller(replace(settings, model=str(folder), served_model_name=name), tell))
    return 0


def worker(words: Sequence[str]) -> int:
    settings = load_or_exit(WorkerSettings, words, "kilburn worker", ABOUT_WORKER, "model")
    from kilburn.controller.prepared import prepared_folder

    folder = prepared_folder(settings.model, settings.revision)
    settings = replace(settings, model=str(folder))
    if settings.tp == 1 or settings.rank >= 0:
        os.execv(sys.executable, [sys.executable, "-m", "kilburn.worker", *as_flags(settings)])
    from kilburn.controller.rank_processes import run_ranks

    return run_ranks(replace(settings, name=settings.name or default_name()))


def gateway(words: Sequence[str]) -> int:
    settings = load_or_exit(GatewaySettings, words, "kilburn gateway", ABOUT_GATEWAY, "model")
    logs.set_up(settings.log_level, settings.log_format)
    from kilburn.controller.gateway.app import RunningGateway, run_gateway
    from kilburn.controller.prepared import prepared_folder, public_name

    def tell(running: RunningGateway) -> None:
        print(f"{name}: REST at {running.http_address}", flush=True)

    name = settings.served_model_name or public_name(settings.model)
    folder = prepared_folder(settings.model, settings.revision)
    asyncio.run(run_gateway(replace(settings, model=str(folder), served_model_name=name), tell))
    return 0


def plan(words: Sequence[str]) -> int:
    settings = load_or_exit(PlanSettings, words, "kilburn plan", ABOUT_PLAN, "model")
    from kilburn.controller.plan import run_plan

    return run_plan(settings)


def simulate(words: Sequence[str]) -> int:
    settings = load_or_exit(SimulateSettings, words, "kilburn simulate", ABOUT_SIMULATE, "model")
    from kilburn.controller.capacity_shown import run_simulate

    return run_simulate(settings)


def tune(words: Sequence[str]) -> int:
    match list(words):
        case ["block-size", *rest]:
            about = ABOUT_TUNE.split("\n\n")[1]
            settings = load_or_exit(TuneSettings, rest, "kilburn tune block-size", about, "model")
            from kilburn.controller.capacity_shown import run_tune_block_size

            return run_tune_block_size(settings)
        case [] | ["--help" | "-h", *_]:
            print(ABOUT_TUNE)
            return 0
    print(ABOUT_TUNE, file=sys.stderr)
    return 2


def top(words: Sequence[str]) -> int:
    settings = load_or_exit(TopSettings, words, "kilburn top", ABOUT_TOP, "url")
    from kilburn.controller.top import run_top

    return run_top(settings)


def provision(words: Sequence[str]) -> int:
    settings = load_or_exit(ProvisionSettings, words, "kilburn provision", ABOUT_PROVISION, "model")
    from kilburn.controller.provision import run_provision

    return run_provision(settings)


def health(words: Sequence[str]) -> int:
    settings = load_or_exit(HealthSettings, words, "kilburn health", ABOUT_HEALTH, "url")
    from kilburn.controller.probe import run_health

    return run_health(settings)


def keys(words: Sequence[str]) -> int:
    match list(words):
        case ["new", folder, *names] if not any(word.startswith("-") for word in (folder, *names)):
            from kilburn.controller.link import new_keys

            made = new_keys(Path(folder), names or ["worker-0"])
            print(f"for the controller  {made.controller}\n                    {made.allowed}")
            for path in made.workers:
                print(f"for a worker        {path}")
            return 0
        case [] | ["--help" | "-h", *_] | ["new", "--help" | "-h", *_]:
            print(ABOUT_KEYS)
            return 0
    print(ABOUT_KEYS, file=sys.stderr)
    return 2


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    about: str
    run: Callable[[Sequence[str]], int]


COMMANDS = {
    "serve": Command("serve MODEL", "a model, ready to be asked: controller and worker on this machine", serve),
    "controller": Command("controller MODEL", "only the controller; workers connect to it", controller),
    "worker": Command("worker MODEL", "only a worker; it connects to a controller", worker),
    "gateway": Command("gateway MODEL", "one address before several controllers", gateway),
    "plan": Command("plan MODEL", "what fits into a device's memory, before there is a device", plan),
    "simulate": Command("simulate MODEL", "how a cluster would serve a trace, before there is one", simulate),
    "tune": Command("tune block-size MODEL", "which size of blocks suits a trace", tune),
    "top": Command("top", "a running server's blocks and requests, in this terminal", top),
    "health": Command("health [URL]", "how a server is; status 0 where it is well", health),
    "provision": Command("provision MODEL", "model and keys for compose.yaml, into a folder", provision),
    "keys": Command("keys new FOLDER", "keys for workers on other machines", keys),
}


def overview() -> str:
    rows = "\n".join(f"  kilburn {command.usage:<22} {command.about}" for command in COMMANDS.values())
    return f"""Kilburn {version()} serves language models; their KV cache is virtual memory.

{rows}

MODEL is a folder in Hugging Face form (safetensors), a GGUF file, {BUNDLED_NAME} (bundled) or a hub id.

  kilburn serve {BUNDLED_NAME}    try it: prints a curl line that works
  kilburn serve --help                   every setting, with its default
  kilburn --version"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    match words:
        case [] | ["--help" | "-h" | "help", *_]:
            print(overview())
            return 0
        case ["--version" | "-V" | "version", *_]:
            print(f"kilburn {version()}")
            return 0
        case [name, *rest] if name in COMMANDS:
            try:
                return COMMANDS[name].run(rest)
            except (SettingError, ModelRefused) as error:
                complain(f"kilburn {name}", [str(error)])
            except SettingsError as error:
                complain(f"kilburn {name}", error.problems)
            except KeyboardInterrupt:
                return 130
    print(f"kilburn: no such command: {words[0]}{nearest(words[0], COMMANDS)}\n\n{overview()}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
