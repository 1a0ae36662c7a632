"""Every setting of every command, once. `settings.py` says how they are read.

    kilburn serve       ServeSettings  =  ControllerSettings + WorkerSettings
    kilburn controller  ControllerSettings
    kilburn worker      WorkerSettings
    kilburn gateway     GatewaySettings
    kilburn provision   ProvisionSettings
    kilburn health      HealthSettings
    kilburn plan        PlanSettings
    kilburn top         TopSettings
    kilburn simulate    SimulateSettings, kilburn tune  TuneSettings

A name that two commands share means the same in both. The command line resolves `model` to a prepared folder; what runs
behind it (`run_controller`, `python -m kilburn.worker`) is given that folder. Zero, or an empty text, means "choose for
me" wherever the help says so.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kilburn.shared.kinds import (
    Choice,
    Choices,
    Count,
    Counts,
    Duration,
    Number,
    Numbers,
    Share,
    Size,
    SizeOrShare,
    Switch,
    Text,
)
from kilburn.shared.model_files import BUNDLED_NAME
from kilburn.shared.settings import (
    Settings,
    SettingsError,
    as_flags,
    complain,
    help_text,
    load,
    load_or_exit,
    narrowed,
    setting,
)

__all__ = [
    "ControllerSettings",
    "GatewaySettings",
    "HealthSettings",
    "PlanSettings",
    "ProvisionSettings",
    "ServeSettings",
    "Settings",
    "SettingsError",
    "SimulateSettings",
    "TopSettings",
    "TuneSettings",
    "WorkerSettings",
    "as_flags",
    "complain",
    "help_text",
    "load",
    "load_or_exit",
    "narrowed",
]

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
MODEL = f"a folder (safetensors), a GGUF file, {BUNDLED_NAME} (bundled) or a hub id"
REVISION = "of a hub id: branch, tag or commit; empty: main"
DTYPES = Choice(
    ("auto", "float32", "float16", "bfloat16"), (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16"))
)
PLOT_FORMS = (".svg", ".png", ".pdf")
QUANTIZATIONS = Choice(("none", "float16", "int8"), (("fp16", "float16"),))
QUANTIZATION = "of weights, on CPUs in float32: float16: rounded; int8: one scale an output, one a row of what meets it"
LOG_FORMATS = Choice(("human", "json"))
LOG_FORMAT = "how log lines look: for people, or one JSON object a line"
LOG_LEVELS = Choice(("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class DoorSettings(Settings):
    """What every process with a REST API has: a model to read prompts with, a door, a registry, an end."""

    model: str = setting("", Text("MODEL"), MODEL, required=True)
    revision: str = setting("", Text("REVISION"), REVISION)
    served_model_name: str = setting("", Text("NAME"), "what clients call the model; empty: the model's own name")
    host: str = setting("127.0.0.1", Text("ADDRESS"), "address of the REST API; beyond loopback it wants API keys")
    port: int = setting(8000, Count(0, 65535, "PORT"), "port of the REST API; 0: any free one, which is printed")
    api_key_file: str = setting("", Text("FILE"), "file of API keys; empty: none, which only loopback allows")
    tls_certificate: str = setting(
        "", Text("FILE"), "certificate (PEM, with its chain) of the REST API, which is then https; empty: it is http"
    )
    tls_key: str = setting("", Text("FILE"), "its private key (PEM)")
    cors_origins: str = setting(
        "", Text("ORIGIN,ORIGIN"), "pages that a browser may let ask here, as https://chat.example, or *; empty: none"
    )
    redis: str = setting("", Text("URL"), "prefix registry for several controllers; empty: none")
    server_key_file: str = setting(
        "", Text("FILE"), "random bytes (16 or more) that salts and signatures come from; empty: drawn anew"
    )
    max_body: int = setting(8 << 20, Size(1024), "largest request body")
    max_header: int = setting(8190, Size(1024), "largest header of a request")
    max_url: int = setting(8190, Size(1024), "longest first line of a request, with its URL")
    stalled_seconds: float = setting(
        60.0,
        Duration(0.0, 86400.0),
        "a client that reads nothing of its answer for so long is disconnected; 0: none is",
    )
    sending_seconds: float = setting(
        60.0,
        Duration(0.0, 86400.0),
        "in which a request's headers must be complete, and 16K more of its body come, or its end (408); 0: any time",
    )
    max_connections: int = setting(
        4096,
        Count(0, 1_000_000),
        "clients connected at once; of those beyond only probes and figures are answered (503); 0: any number",
    )
    drain_seconds: float = setting(30.0, Duration(0.0, 86400.0), "on SIGTERM, how long running requests may go on")
    log_format: str = setting("human", LOG_FORMATS, LOG_FORMAT)
    log_level: str = setting("info", LOG_LEVELS, "the least of what is logged to stderr")

    def faults(self) -> Iterable[tuple[str, str]]:
        yield from super().faults()
        if bool(self.tls_certificate) != bool(self.tls_key):
            yield "tls_certificate", "a certificate and its key go together; give both --tls-certificate and --tls-key"
        origins = [origin.strip() for origin in self.cors_origins.split(",") if origin.strip()]
        if not all(re.fullmatch(r"\*|https?://[^/\s]+/?", origin) for origin in origins):
            yield "cors_origins", "must be origins without a path, as https://chat.example,http://localhost:3000, or *"


@dataclass(frozen=True)
class ControllerSettings(DoorSettings):
    """What decides: the door, the queue, the leases."""

    bind: str = setting(
        DEFAULT_ENDPOINT, Text("ENDPOINT"), "where workers connect; beyond loopback it wants curve_keys"
    )
    curve_keys: str = setting("", Text("FOLDER"), "keys that `kilburn keys new` made; empty: none, loopback only")
    max_waiting: int = setting(1024, Count(1, 1_000_000), "requests that may wait; more are turned away (429)")
    max_waiting_tokens: int = setting(0, Count(0, 1 << 40), "prompt tokens that may wait (429); 0: any number")
    queue_seconds: float = setting(
        0.0,
        Duration(0.0, 86400.0),
        "longest wait of a request to begin (503); 0: no limit; `queue_timeout` may be less",
    )
    request_seconds: float = setting(
        0.0, Duration(0.0, 86400.0), "longest time of a request in all; 0: no limit; its `timeout` may be less"
    )
    least_priority: int = setting(0, Count(-100, 100), "the most urgent `priority` a request may have; lower is first")
    fair: bool = setting(False, Switch(), "shares of tokens for tenants, by the weights in the file of API keys")
    step_target_ms: int = setting(
        250, Count(0, 60_000), "how long a step with prompts may take while others wait for a token; 0: any time"
    )
    prefix_wait_steps: int = setting(
        64, Count(0, 10_000), "longest wait, in steps, for a common prefix that another request computes; 0: none"
    )
    aging_seconds: float = setting(
        60.0, Duration(0.0, 86400.0), "waiting that makes up for one level of `priority`; 0: nothing does"
    )
    max_choices: int = setting(128, Count(1, 128), "sequences that one request may ask for (n, best_of, beams)")
    tool_parser: str = setting(
        "auto",
        Choice(("auto", "hermes", "llama3", "mistral", "mistral11")),
        "how the model calls tools; auto: its chat template says",
    )
    max_prompt_logprobs: int = setting(
        1 << 18, Count(0, 1 << 24), "log probabilities of prompts in one answer: tokens times those asked for, and one"
    )
    keep_alive_seconds: float = setting(
        15.0, Duration(0.0, 3600.0), "silence of a stream after which a comment is sent; 0: none is"
    )
    max_prompts: int = setting(64, Count(1, 1024), "prompts of one call of completions")
    max_prompt_tokens: int = setting(0, Count(0, 1 << 30), "tokens of one prompt; 0: as many as the model takes")
    max_messages: int = setting(4096, Count(1, 65536), "messages or items of one conversation")
    max_logprobs: int = setting(20, Count(0, 20), "log probabilities of each place (`logprobs`, `top_logprobs`)")
    max_stops: int = setting(16, Count(0, 64), "stop strings of one request")
    max_stop_ids: int = setting(256, Count(0, 1024), "stop ids of one request")
    max_logit_bias: int = setting(1024, Count(0, 16384), "entries of `logit_bias`")
    max_tools: int = setting(128, Count(0, 1024), "tools of one request")
    max_schema: int = setting(64 << 10, Size(0), "largest schema, grammar or pattern that an answer is to obey")
    max_schema_depth: int = setting(64, Count(1, 1000), "how deep lists and objects in it may be nested")
    schema_seconds: float = setting(2.0, Duration(0.1, 60.0), "longest time to compile it before it is refused")
    max_prefixes: int = setting(64, Count(0, 1024), "named prefixes of one tenant, and public ones")
    pinned_percent: int = setting(50, Count(0, 100), "of a pool, what named prefixes may hold")
    preemption: str = setting(
        "auto", Choice(("auto", "swap", "recompute")), "where blocks run out; auto: what is predicted to cost less"
    )
    advertise: str = setting(
        "", Text("URL"), "where gateways reach the REST API, where `host` does not say it, as http://10.0.0.7:8000"
    )
    max_step_tokens: int = setting(
        512, Count(1, 1 << 20), "token positions in one step; long prompts run in such chunks"
    )
    depth: int = setting(2, Count(1, 8), "plans under way at once; 1 waits for each result")
    beat_seconds: float = setting(0.5, Duration(0.01, 60.0), "how often each side says that it is there")
    silence_seconds: float = setting(5.0, Duration(0.05, 600.0), "a worker silent for so long has lost its lease")
    step_seconds: float = setting(
        60.0, Duration(0.1, 3600.0), "a step unanswered for so long, and for 10 times its prediction, ends the lease"
    )
    progress_seconds: float = setting(
        15.0, Duration(0.05, 3600.0), "work without progress for so long turns /health 503"
    )
    recovery_seconds: float = setting(60.0, Duration(0.0, 86400.0), "how long requests wait for a worker to come back")
    log_requests: bool = setting(False, Switch(), "a line for each request that ends; without it, for those that fail")
    log_text: bool = setting(False, Switch(), "prompts and answers in the lines about requests; without it, never")
    trace_to: str = setting(
        "", Text("URL"), "OTLP/HTTP collector of spans, as http://127.0.0.1:4318; empty: no tracing"
    )
    trace_percent: int = setting(
        100, Count(0, 100), "of the requests whose caller did not decide it, how many are traced"
    )
    trace_every: int = setting(0, Count(0, 1 << 30), "one step in so many becomes a span of its own; 0: none")
    vllm_metric_names: bool = setting(False, Switch(), "in /metrics, also the names that dashboards for vLLM know")

    def faults(self) -> Iterable[tuple[str, str]]:
        yield from super().faults()
        if self.silence_seconds < 2 * self.beat_seconds:
            yield "silence_seconds", f"must be at least twice beat_seconds; give {2 * self.beat_seconds:g}s or more"
        if self.advertise and not self.advertise.startswith(("http://", "https://")):
            yield "advertise", "must be an address of the REST API, as http://10.0.0.7:8000"


@dataclass(frozen=True)
class WorkerSettings(Settings):
    """What computes: the model, its memory, its batch."""

    model: str = setting("", Text("MODEL"), MODEL, required=True)
    revision: str = setting("", Text("REVISION"), REVISION)
    connect: str = setting(DEFAULT_ENDPOINT, Text("ENDPOINT"), "the controller's `bind`")
    curve_keys: str = setting("", Text("FOLDER"), "keys that `kilburn keys new` made; empty: none, loopback only")
    name: str = setting("", Text("NAME"), "name of this worker; empty: host name and process id")
    device: str = setting(
        "auto", Choice(("auto", "cpu", "cuda")), "where the model runs; auto: cuda where there is one"
    )
    dtype: str = setting("auto", DTYPES, "of weights and KV; auto: by device")
    quantization: str = setting("none", QUANTIZATIONS, QUANTIZATION)
    kv_dtype: str = setting(
        "auto", Choice(("auto", "fp8", "int8")), "of KV alone; auto: as dtype; fp8 (e4m3) on GPUs, int8 anywhere"
    )
    kv_scales: str = setting(
        "auto",
        Choice(("auto", "static", "block")),
        "of 8-bit KV; static: one a layer and head, measured at load; block: one a row, kept in its block",
    )
    threads: int = setting(0, Count(0, 1024), "CPU threads of the model; 0: as many as there are cores")
    sharers: int = setting(
        1, Count(1, 1024), "workers that share this device's spare memory and these cores, this one included"
    )
    block_size: int = setting(16, Count(1, 256), "token positions in one block of KV")
    kv_memory: int = setting(0, Size(), "memory of the KV pool; 0: what the device can spare")
    num_blocks: int = setting(0, Count(0, 2**31 - 1), "blocks of the KV pool, in place of kv_memory; 0: by memory")
    host_pool: int | Share = setting(
        0, SizeOrShare(), "second pool of KV, in the host's memory, or a share of that; 0: none"
    )
    verify_swap: bool = setting(False, Switch(), "checksums of blocks on the host; a mismatch is computed again")
    max_rows: int = setting(128, Count(1, 4096), "sequences in one batch")
    max_step_tokens: int = setting(
        512, Count(1, 1 << 20), "token positions in one step; long prompts run in such chunks"
    )
    max_len: int = setting(0, Count(0, 1 << 24), "tokens in one sequence; 0: as the model was made for")
    tp: int = setting(1, Count(1, 1024), "ranks that hold one copy of the model between them; see `kilburn plan --tp`")
    rank: int = setting(-1, Count(-1, 1023), "which of these ranks this is, from 0; -1: all, started on this machine")
    collectives: str = setting(
        "lo", Text("INTERFACE"), "interface or address that ranks meet and compute over; see insecure_collectives"
    )
    insecure_collectives: bool = setting(
        False, Switch(), "let ranks meet beyond loopback, where nobody proves who he is: only on a network of your own"
    )
    exit_with_parent: bool = setting(False, Switch(), "end when the process that started this one does")
    profile: str = setting(
        "", Text("FOLDER"), "traces of the first steps, and of others on SIGUSR2, by torch's profiler; empty: none"
    )
    profile_steps: int = setting(20, Count(1, 10_000), "steps in one such trace")
    log_format: str = setting("human", LOG_FORMATS, LOG_FORMAT)
    log_level: str = setting("info", LOG_LEVELS, "the least of what is logged to stderr")

    def faults(self) -> Iterable[tuple[str, str]]:
        yield from super().faults()
        if self.num_blocks and self.kv_memory:
            yield "num_blocks", "the pool's size is given twice; leave out num_blocks or kv_memory"
        if self.kv_scales != "auto" and self.kv_dtype == "auto":
            yield "kv_scales", "only KV of 8 bits has scales; give kv_dtype int8 or fp8, or leave kv_scales out"
        if self.max_step_tokens < self.max_rows:
            yield "max_step_tokens", f"must be at least max_rows, so that every row can go on; give {self.max_rows}"
        if self.rank >= self.tp:
            yield "rank", f"there are {self.tp} ranks (tp), counted from 0; give {self.tp - 1} or less, or a larger tp"
        if self.rank >= 0 and self.tp > 1 and not self.name:
            yield "name", "the ranks of one copy of a model have one name; give each of them the same"


@dataclass(frozen=True)
class ServeSettings(WorkerSettings, ControllerSettings):
    """Both, on one machine."""

    groups: int = setting(
        1, Count(1, 64), "workers, each with the whole model; threads and memory are divided among them"
    )
    bind: str = setting("", Text("ENDPOINT"), "where the worker connects; empty: a free port of loopback")
    connect: str = setting("", Text("ENDPOINT"), "as the worker sees `bind`; empty: the same")


@dataclass(frozen=True)
class GatewaySettings(DoorSettings):
    """A door before several controllers."""

    controllers: str = setting("", Text("URL,URL"), "REST APIs of controllers, beside those that the registry knows")
    lost_seconds: float = setting(
        5.0, Duration(0.05, 600.0), "a controller that answers nothing for so long is lost, and so are its streams"
    )

    def faults(self) -> Iterable[tuple[str, str]]:
        yield from super().faults()
        if not self.controllers and not self.redis:
            yield "controllers", "there is nobody to send requests to; give --controllers, or --redis"
        if not all(url.strip().startswith(("http://", "https://")) for url in self.controllers.split(",") if url):
            yield "controllers", "must be addresses of REST APIs, as http://10.0.0.7:8000,http://10.0.0.8:8000"
        if self.redis and not self.server_key_file:
            yield "server_key_file", "without the controllers' key nothing in Redis can be read; give theirs"


@dataclass(frozen=True)
class TopSettings(Settings):
    """Which server is looked at, and how."""

    url: str = setting("http://127.0.0.1:8000", Text("URL"), "the REST API of the server")
    key_file: str = setting("", Text("FILE"), "file that holds one admin's API key; empty: none")
    once: bool = setting(False, Switch(), "print what there is as text, and end; so it is where there is no terminal")


@dataclass(frozen=True)
class PlanSettings(Settings):
    """What a worker would make of a device's memory. Settings that a worker has too mean the same."""

    model: str = setting("", Text("MODEL"), MODEL, required=True)
    revision: str = setting("", Text("REVISION"), REVISION)
    memory: int = setting(0, Size(1), "of one device, before anything is loaded", required=True)
    tp: int = setting(1, Count(1, 1024), "devices that share one copy of the model; all amounts are of one of them")
    dtype: str = setting("auto", DTYPES, "of weights and KV; auto: bfloat16")
    quantization: str = setting("none", QUANTIZATIONS, QUANTIZATION)
    kv_dtype: str = setting(
        "auto", Choice(("auto", "fp8", "int8")), "of KV alone; auto: as dtype; fp8 (e4m3) on GPUs, int8 anywhere"
    )
    kv_scales: str = setting(
        "auto",
        Choice(("auto", "static", "block")),
        "of 8-bit KV; static: one a layer and head, measured at load; block: one a row, kept in its block",
    )
    block_size: int = setting(16, Count(1, 256), "token positions in one block of KV")
    host_pool: int | Share = setting(
        0, SizeOrShare(), "second pool of KV, in the host's memory, or a share of that; 0: none"
    )
    host_memory: int = setting(0, Size(), "memory of the host that pools may take, all devices together; 0: any")
    max_rows: int = setting(128, Count(1, 4096), "sequences in one batch")
    max_step_tokens: int = setting(
        512, Count(1, 1 << 20), "token positions in one step; long prompts run in such chunks"
    )
    max_len: int = setting(0, Count(0, 1 << 24), "tokens in one sequence; 0: as the model was made for")
    lengths: tuple[int, ...] = setting((512, 2048, 8192), Counts(1, 1 << 24), "sequences of which lengths to count")
    json: bool = setting(False, Switch(), "print one JSON object instead of a table")

    def faults(self) -> Iterable[tuple[str, str]]:
        yield from super().faults()
        if self.kv_scales != "auto" and self.kv_dtype == "auto":
            yield "kv_scales", "only KV of 8 bits has scales; give kv_dtype int8 or fp8, or leave kv_scales out"
        if self.max_step_tokens < self.max_rows:
            yield "max_step_tokens", f"must be at least max_rows, so that every row can go on; give {self.max_rows}"


@dataclass(frozen=True)
class ProvisionSettings(Settings):
    """What a fresh installation is to have before its first start."""

    model: str = setting("", Text("MODEL"), MODEL, required=True)
    revision: str = setting("", Text("REVISION"), REVISION)
    served_model_name: str = setting("", Text("NAME"), "what clients call the model; empty: the model's own name")
    into: str = setting("", Text("FOLDER"), "where all of it goes, in a folder for each service", required=True)
    redis_host: str = setting("redis", Text("HOST"), "where the controller finds the Redis that is given a password")
    redis_port: int = setting(6379, Count(1, 65535, "PORT"), "and at which port")


@dataclass(frozen=True)
class HealthSettings(Settings):
    """Who is asked how it is."""

    url: str = setting("http://127.0.0.1:8000", Text("URL"), "the REST API of the server")
    probe: str = setting("health", Choice(("health", "ready", "live")), "what is asked; see docs/OPERATING.md")
    timeout_seconds: float = setting(3.0, Duration(0.1, 60.0), "how long an answer may take")


KV_POLICIES = ("paged", "orca-max", "orca-pow2", "orca-oracle", "batch")


@dataclass(frozen=True)
class SimulateSettings(Settings):
    """A cluster that does not exist, and what is asked of it. Settings that others have too mean the same."""

    model: str = setting("", Text("MODEL"), f"{MODEL}; or one by name alone, as opt-13b", required=True)
    revision: str = setting("", Text("REVISION"), REVISION)
    gpu: str = setting("a100-80gb", Text("NAME"), "what each rank runs on; an unknown name lists those there are")
    measured: str = setting("", Text("FILE"), "in place of gpu: what bench/gpu_check.py wrote on one")
    memory: int = setting(0, Size(), "of one device, before anything is loaded; 0: as published")
    tp: int = setting(1, Count(1, 1024), "devices that share one copy of the model; all amounts are of one of them")
    groups: tuple[int, ...] = setting((1,), Counts(1, 100_000), "copies of the model; each number is a run")
    controllers: int = setting(0, Count(0, 100_000), "engines that groups are dealt to; 0: one for every 8 groups")
    dtype: str = setting("auto", DTYPES, "of weights and KV; auto: bfloat16")
    kv_dtype: str = setting(
        "auto", Choice(("auto", "fp8", "int8")), "of KV alone; auto: as dtype; fp8 (e4m3) on GPUs, int8 anywhere"
    )
    block_sizes: tuple[int, ...] = setting((16,), Counts(1, 256), "token positions in one block; each is a run")
    num_blocks: int = setting(0, Count(0, 2**31 - 1), "blocks of the KV pool, in place of kv_memory; 0: by memory")
    host_pool: int | Share = setting(
        0, SizeOrShare(), "second pool of KV, in the host's memory, or a share of that; 0: none"
    )
    max_rows: int = setting(128, Count(1, 4096), "sequences in one batch")
    max_step_tokens: int = setting(
        512, Count(1, 1 << 20), "token positions in one step; long prompts run in such chunks"
    )
    max_len: int = setting(0, Count(0, 1 << 24), "tokens in one sequence; 0: as the model was made for")
    depth: int = setting(2, Count(1, 8), "plans under way at once; 1 waits for each result")
    step_target_ms: int = setting(
        250, Count(0, 60_000), "how long a step with prompts may take while others wait for a token; 0: any time"
    )
    preemption: str = setting(
        "auto", Choice(("auto", "swap", "recompute")), "where blocks run out; auto: what is predicted to cost less"
    )
    policies: tuple[str, ...] = setting(
        ("paged",), Choices(KV_POLICIES), "how memory is kept; all but paged are what others did; each is a run"
    )
    trace: str = setting(
        "", Text("FILE,FILE"), "recorded requests, or a folder of ServeGen's clients; empty: by lengths"
    )
    speed: float = setting(1.0, Number(0.001, 100_000), "the trace's own times, so many times as fast")
    load_factor: int = setting(
        1, Count(1, 100_000), "so many times a trace's load: it and copies of it that begin at other moments of it"
    )
    rates: tuple[float, ...] = setting(
        (), Numbers(0.001, 1_000_000), "requests a second, as a Poisson process; each is a run; none: the trace's times"
    )
    seconds: float = setting(600.0, Duration(0.0, 7 * 86400.0), "how long requests come; 0: as long as the trace")
    prompt_tokens: int = setting(512, Count(1, 1 << 24), "mean of the prompts, where no trace says more")
    output_tokens: int = setting(256, Count(1, 1 << 24), "mean of the answers, where no trace says more")
    choices: int = setting(1, Count(1, 128), "sequences that each request asks for")
    first_seconds: float = setting(2.0, Duration(0.0, 86400.0), "objective: to the first token; 0: any time")
    gap_seconds: float = setting(
        0.1, Duration(0.0, 3600.0), "objective: a request's mean time between tokens; 0: any time"
    )
    price: float = setting(0.0, Number(0.0, 1_000_000), "of one device for an hour, in any currency; 0: not counted")
    seed: int = setting(0, Count(0, 1 << 60), "of whatever is drawn")
    jobs: int = setting(0, Count(0, 1024), "processes; 0: as many as there are cores")
    json: bool = setting(False, Switch(), "print one JSON object instead of a table")
    plot: str = setting("", Text("FILE"), "draw the runs into this .svg, .png or .pdf too; needs kilburn[plots]")

    def faults(self) -> Iterable[tuple[str, str]]:
        yield from super().faults()
        if self.max_step_tokens < self.max_rows:
            yield "max_step_tokens", f"must be at least max_rows, so that every row can go on; give {self.max_rows}"
        if not self.trace and not self.rates:
            yield "rates", "without a trace nobody says when requests come; give some, as 1,2,4, or a trace"
        if not self.seconds and (self.rates or not self.trace):
            yield "seconds", "only a trace with times of its own comes to an end; give a time such as 10m"
        if self.choices > self.max_rows:
            yield "choices", f"must not be more than max_rows; give {self.max_rows} or fewer"
        if self.load_factor > 1 and (self.rates or not self.trace):
            yield "load_factor", "multiplies the load of a trace at its own times; leave out --rates and give a --trace"
        if self.plot and not self.plot.lower().endswith(PLOT_FORMS):
            yield "plot", f"must end with {', '.join(PLOT_FORMS)}, which says the form of the drawing"


@dataclass(frozen=True)
class TuneSettings(SimulateSettings):
    """The same, once for every value of what is tuned."""

    block_sizes: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16, 32, 64, 128, 256), Counts(1, 256), "token positions in one block; each is a run"
    )
    within_percent: float = setting(
        2.0, Number(0.0, 100.0), "of the best latency: the largest block that is within it is recommended"
    )
