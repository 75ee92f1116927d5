"""The typed settings of a job: one field = one TOML key = one `--set` key = one line of documentation.

`jobs.job_file` says where values come from. Nothing in the code asks which machine it runs on: what differs between a
laptop and 8 x B300 is in these values.
"""

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PositiveFloat, model_validator
from pydantic_core import to_jsonable_python

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class JobSettings(Section):
    name: str = Field("job", description="Name of the job; the default run directory is runs/<name>")
    seed: int = Field(0, description="Seed of every random choice: sample order, sampling, initial weights")


class VerifierSettings(Section):
    model: str = Field("tiny", description="Hugging Face id, local folder, or `tiny` for the shipped Kimi-K2.5 in miniature")
    revision: str | None = Field(
        None, description="Commit on the hub (40 hex digits); None takes the newest at the first start and records it"
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Compute type; float16 is refused, vLLM rescales DeepSeek's residual in it"
    )
    taps: tuple[int, ...] | None = Field(None, description="EAGLE-3 ids (residual stream at the INPUT of layer i); default (2, L//2, L-3)")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs the verifier is spread over")
    parallel: Literal["auto", "tp", "tp_ep", "dp", "dp_ep"] = Field(
        "auto",
        description="Over those GPUs `tp` splits everything, `dp` only the experts while replicas have attention, cache and requests of their own; with `_ep` each GPU has whole experts; `auto` chooses between `tp` and `tp_ep` and says why",
    )
    data_parallel_size: int | None = Field(
        None, ge=2, description="Replicas of `dp` and `dp_ep`, a divisor of verifier.tensor_parallel_size; None is one a GPU"
    )
    max_model_len: int = Field(2048, ge=16, description="Longest prompt plus response in tokens")
    max_num_seqs: int = Field(64, ge=1, description="Requests decoded at once")
    max_num_batched_tokens: int = Field(2048, ge=16, description="Tokens of one forward pass; longer prompts are prefilled in chunks")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of GPU memory the engine may take; the rest serves the baseline's replay"
    )
    kv_cache_gib: float | None = Field(None, gt=0, description="Size of the KV cache on CPU in GiB; None lets the engine choose")
    enforce_eager: bool = Field(False, description="No CUDA graphs and no torch.compile; right on CPU, far too slow for 1T parameters")
    trust_remote_code: bool = Field(True, description="Kimi's tokenizer is Python code in its repository")
    load: Literal["lazy", "eager", "threads", "fastsafetensors", "runai_streamer"] = Field(
        "lazy",
        description="How vLLM loads the weights: `lazy` maps the files, `eager` reads each whole first (network disks), `threads` maps load_threads files at once; the last two need a package of that name",
    )
    load_threads: int = Field(
        8,
        ge=1,
        description="Ranges of the checkpoint read at once, ahead of the load and to measure the disk; also vLLM's threads where load asks for them",
    )
    read_ahead: bool = Field(
        True, description="Read the checkpoint into the page cache from fetch on, as far as memory has room, until the engine is up"
    )
    start_minutes: float = Field(
        90,
        gt=0,
        description="A start of the engine that is not done after so long hangs: stop with exit code 75. 540 GB at 400 MB/s take 22 minutes, compiling some more",
    )
    stall_seconds: int = Field(600, ge=1, description="No new token for so long means a hung engine: stop with exit code 75")


class PromptSource(Section):
    source: str = Field(description="A JSONL file or a `datasets` name")
    samples: int = Field(ge=1, description="Conversations taken from it for the train split")
    revision: str | None = Field(None, description="Commit on the hub; None takes the newest at the first start and records it")
    subset: str | None = Field(None, description="Configuration name of the data set")
    dataset_split: str = Field("train", description="Split of the data set that is read")
    messages_field: str = Field("messages", description="Column with messages, or with the text of one user turn")
    licence: str | None = Field(None, description="Licence of these prompts")


class StandardPrompts(Section):
    name: str = Field(description="`mt-bench`, `humaneval`, `gsm8k`, `math500`, or a name of your own with a `source`")
    source: str | None = Field(None, description="A JSONL file or a `datasets` name; None is the known data set of that name on the hub")
    samples: int | None = Field(None, ge=1, description="Prompts taken from it, in seeded order; None takes all")
    revision: str | None = Field(None, description="Commit on the hub; None takes the newest at the first start and records it")


class PromptsSettings(Section):
    source: str = Field("shipped", description="`shipped` (smoke), a JSONL file, or a `datasets` name")
    revision: str | None = Field(None, description="Commit on the hub; None takes the newest at the first start and records it")
    subset: str | None = Field(None, description="Configuration name of the data set")
    dataset_split: str = Field("train", description="Split of the data set that is read")
    messages_field: str = Field(
        "messages", description="Column with OpenAI messages, ShareGPT-style from/value turns, or the text of one user turn"
    )
    licence: str | None = Field(None, description="Licence of the prompts, for the model card")
    mix: tuple[PromptSource, ...] = Field(
        (), description="Further sources of the train split (tool calls, other languages), each with its share"
    )
    standard: tuple[StandardPrompts, ...] = Field(
        (), description="Standard prompts, answered and judged beside the eval split; training rows that overlap with them are dropped"
    )
    domains: dict[str, str] = Field(
        {}, description="Source -> domain, for the figures by domain where the name of the source does not tell (chat, code, math, …)"
    )
    train_samples: int = Field(1000, ge=1, description="Conversations of the train split, those of the mix included")
    eval_samples: int = Field(64, ge=1, description="Conversations of the eval split")
    eval_source: str | None = Field(
        None, description="JSONL file or `datasets` name for the eval split; None takes rows marked `eval`, else a seeded hold-out"
    )
    thinking_share: Share = Field(1.0, description="Share of conversations answered in thinking mode; the others in instant mode")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer rendered prompts are dropped and counted")


class SamplingSettings(Section):
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(0.95, gt=0, le=1, description="Nucleus sampling")


class GenerateSettings(Section):
    backend: Literal["vllm", "speculators"] = Field(
        "vllm", description="`speculators` extracts states of existing responses with its own generator, as a reference"
    )
    responses: str | None = Field(
        None, description="A folder with eval/responses.jsonl and train/responses.jsonl: extract states for them, generate nothing"
    )
    endpoints: tuple[str, ...] = Field(
        (),
        description="Running vLLM servers of the verifier (http://host:8000) that decode the answers; this machine's verifier only makes their states. Their key is in the environment variable VLLM_API_KEY",
    )
    endpoint_model: str | None = Field(None, description="What the verifier is called at those servers; None takes verifier.model")
    endpoint_connections: int = Field(
        256, ge=1, description="Requests in flight at each of those servers; more than its --max-num-seqs only wait there"
    )
    speculate: str = Field(
        "off",
        description="Who drafts while the verifier answers: `off`, `ngram`, a candidate's name, or `best` (as this run's own baseline judged it, or the only candidate); answers keep their distribution, what is accepted stands in the report",
    )
    max_new_tokens: int = Field(
        1024, ge=1, description="Longest answer; capped answers are kept, dropping them biases towards easy prompts"
    )
    thinking: SamplingSettings = Field(SamplingSettings(), description="Sampling in thinking mode")
    instant: SamplingSettings = Field(SamplingSettings(temperature=0.6), description="Sampling in instant mode")
    train_token_budget: int | None = Field(
        None, ge=1, description="Tokens of the train split, taken as a prefix in seeded id order; None takes all"
    )
    max_dropped_share: Share = Field(0.01, description="More samples than this dropped stops the run")
    stop_on_repetition: int | None = Field(
        512,
        ge=16,
        description="An answer ends where its last so many tokens repeat a piece of at most an eighth of them; None lets it run on",
    )


class StatesSettings(Section):
    dtype: Literal["verifier", "fp8"] = Field("verifier", description="Type of the stored train states; fp8 halves them, eval is never fp8")
    shard_mib: int = Field(1024, ge=1, description="Size of a shard file in MiB")
    extent_rows: int = Field(256, ge=1, description="Rows gathered for a sample before they are written as one extent")
    check_one_in: int = Field(
        1000,
        ge=0,
        description="One response row in so many is read back and checked against its log-probability while writing; 0 checks none",
    )


class VocabSettings(Section):
    size: int | None = Field(None, ge=16, description="Draft vocabulary; None is the verifier's whole vocabulary")
    min_coverage: Share = Field(0.9, description="Smaller coverage of response tokens stops the run")


class HeadCandidate(Section):
    name: str = Field(description="Short name used in the ledger and the report")
    model: str = Field(description="Hugging Face id or local folder")
    revision: str | None = Field(None, description="Commit of the hub repository; None takes the newest at the first start and records it")
    taps: tuple[int, int, int] | None = Field(
        None,
        description="EAGLE-3 ids (INPUT of layer i) that this head reads, where you know them; None judges both readings of its config",
    )


class HeadsSettings(Section):
    candidates: tuple[HeadCandidate, ...] = Field((), description="Existing heads judged before any money is spent on training")
    untrained: bool = Field(False, description="Judge a freshly initialised head too: the floor any training must leave")
    ngram: bool = Field(True, description="Judge n-gram speculation too: free, so it has to be beaten")
    ngram_window: tuple[int, int] = Field(
        (2, 5),
        description="Shortest and longest suffix that n-gram speculation looks up; vLLM's default (5, 5) proposes less and accepts less",
    )
    warm_start: str = Field("best", description="`best` candidate, `none` (from scratch) or a candidate's name")


class GateSettings(Section):
    train_if_best_below: float | None = Field(
        None, gt=1, description="Train only if the best existing head's acceptance length is below this"
    )
    min_gain: float | None = Field(None, ge=0, description="A short trial must beat the baseline's acceptance length by this")
    trial_fraction: Share = Field(0.05, description="Share of the train split of that trial, generated first and reused")


class TrainSettings(Section):
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto` takes the GPUs where there are any")
    processes: int | None = Field(
        None,
        ge=1,
        description="Processes that share the packed rows of a step; None is one a GPU, as far as accumulate can be shared evenly",
    )
    epochs: float = Field(1.0, gt=0, description="Passes over the train split")
    max_steps: int | None = Field(None, ge=1, description="Stop after so many optimizer steps, whatever the epochs")
    tokens_per_step: int = Field(4096, ge=8, description="Tokens of one packed row of samples: the static shape of a step")
    accumulate: int = Field(1, ge=1, description="Packed rows of one optimizer step over all ranks")
    max_length: int = Field(2048, ge=8, description="Longer samples are split at this many rows; the context before the cut is not seen")
    learning_rate: float = Field(5e-5, gt=0, description="Peak of the schedule when training from scratch")
    warm_start_learning_rate: float = Field(2e-5, gt=0, description="Peak of the schedule from a warm start")
    warmup_share: Share = Field(0.015, description="Linear warm-up as a share of all steps")
    final_share: Share = Field(0.0, description="Cosine ends at this share of the peak")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's decay rates")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled, on matrices only")
    clip: float = Field(1.0, gt=0, description="Largest gradient norm")
    ttt_steps: int = Field(3, ge=1, le=7, description="Training-time-test steps: how far ahead the head is unrolled")
    single_step_share: Share = Field(0.0, description="Share of the steps, at the start, with one TTT step only")
    ttt_decay: float = Field(1.0, gt=0, le=1, description="Weight of TTT step k is this to the power k")
    loss: Literal["forward_kl", "cross_entropy"] = Field(
        "forward_kl", description="Against the verifier's distribution, or its sampled tokens"
    )
    compile: bool = Field(True, description="torch.compile the step; eager on CPU")
    fp8: bool = Field(
        False, description="Matrix products of the layer in FP8 (Hopper, Blackwell, Ada); compare acceptance before you keep it"
    )
    precision: Literal["bf16", "tf32", "fp32"] = Field(
        "bf16",
        description="Of the matrix products on a GPU; weights and optimizer state are fp32 in any case. Half the speed (tf32) and less (fp32) for 0.01 to 0.02 of acceptance with a small verifier",
    )
    checkpoint_every: int = Field(200, ge=1, description="Optimizer steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="Newest whole checkpoints kept")
    evaluate_every: int | None = Field(None, ge=1, description="Optimizer steps between replays on the eval split; None only at the end")
    evaluate_samples: int | None = Field(
        None,
        ge=1,
        description="Eval answers that those replays judge, drawn by the seed, always the same; None all. The stage evaluate judges all",
    )
    log_every: int = Field(10, ge=1, description="Optimizer steps between lines of the log")
    bad_step_limit: int = Field(
        20, ge=1, description="Steps with a loss or gradient that is not finite are skipped; more than this stops the run"
    )
    spike_factor: float | None = Field(
        8.0, gt=1, description="A step whose loss is so many times the usual one is skipped like one that is not finite; None never"
    )
    patience: int | None = Field(
        None, ge=1, description="Training ends after so many evaluations without a longer acceptance; None trains to the end"
    )
    patience_gain: float = Field(0.0, ge=0, description="What an evaluation must gain in acceptance length to count as longer")
    keep_best: bool = Field(True, description="End with the weights of the evaluation with the longest acceptance, not with the last ones")
    layers: Literal[1] = Field(1, description="Decoder layers of the head; EAGLE-3 has one")
    heads: int | None = Field(None, ge=1, description="Attention heads from scratch; None takes the verifier's number")
    kv_heads: int | None = Field(None, ge=1, description="KV heads from scratch; None is as many as heads")
    head_dim: int | None = Field(None, ge=2, description="Width of a head from scratch; None is hidden size / heads")
    intermediate_size: int | None = Field(None, ge=1, description="FFN width from scratch; None takes the verifier's dense FFN")
    rope_theta: float = Field(1e6, gt=0, description="Rope base from scratch; a warm start keeps its own, never the verifier's")
    norm_before_residual: bool = Field(True, description="Residual of the layer is the normed feature; learns clearly faster from scratch")

    def processes_on(self, gpus: int) -> int:
        """How many processes share a step on a machine with so many GPUs: `processes`, else the most its packed rows are shared evenly over."""
        usable = 1 if self.device == "cpu" else max(1, gpus)
        return self.processes or max(n for n in range(1, usable + 1) if self.accumulate % n == 0)


class LiveSettings(Section):
    concurrencies: tuple[int, ...] = Field(
        (),
        description="Requests in flight at once, for each a measurement of none and of the winner through the real server; empty measures nothing live",
    )
    requests: int = Field(64, ge=1, description="Prompts of the eval split sent at each concurrency")
    max_new_tokens: int | None = Field(None, ge=1, description="Longest live answer; None takes generate.max_new_tokens")
    temperature: float | None = Field(
        None,
        ge=0,
        description="Of the live answers; None takes that of the mode of most prompts (on CPU always 0: its verification is greedy)",
    )
    start_seconds: int = Field(5400, ge=1, description="Longest wait for the server to load the verifier")


class EvaluateSettings(Section):
    draft_tokens: int = Field(3, ge=1, le=15, description="Drafted tokens a step; the public cards use 3, top-1")
    bootstrap: int = Field(1000, ge=100, description="Resamples over prompts for the confidence interval")
    live: LiveSettings = LiveSettings()
    scaling: tuple[float, ...] = Field(
        (),
        description="Shares of the train samples, each trained on from the same start for the scaling table, after the head is published; empty trains none",
    )
    min_gain_over_untrained: float | None = Field(
        None, description="The lower 95 % bound of the paired gain over the untrained head must reach this, else the run fails"
    )
    min_gain_over_ngram: float | None = Field(
        None, description="The lower 95 % bound of the paired gain over n-gram speculation must reach this, else the run fails"
    )
    min_gain_over_best: float | None = Field(
        None,
        description="The same over the best of what exists (existing heads, n-gram), as the baseline found it; nothing to reach where nothing exists",
    )


class PackageSettings(Section):
    name: str = Field("eagle3-head", description="Name of the published head")
    licence: str | None = Field(None, description="Licence of the published head, for the model card")
    sglang: bool = Field(False, description="Also export the `LlamaForCausalLMEagle3` form, in the folder `sglang`")


class PushSettings(Section):
    uri: str | None = Field(None, description="s3://bucket/prefix or file:///folder; None is the folder `published` of the run directory")
    endpoint_url: str | None = Field(None, description="S3 endpoint of another provider than AWS")
    region: str | None = Field(None, description="Region of the bucket")
    path_style: bool | None = Field(
        None,
        description="Bucket in the path (true) or in the host name (false); None is in the path at an endpoint_url, in the host name on AWS",
    )
    checksums: Literal["when_required", "when_supported"] = Field(
        "when_required",
        description="boto3's request_checksum_calculation; the newer default breaks R2, Ceph and OVH, on AWS it spares the MD5 of every part",
    )
    part_mib: int = Field(
        64,
        ge=5,
        le=5120,
        description="Largest part of a multipart upload (less where the threads would not all have work); equal sizes, as R2 demands",
    )
    threads: int = Field(16, ge=1, description="Parts in flight")
    read_back: bool = Field(False, description="Read every object again after the upload and compare its sha256")
    backup: Literal["all", "without_states", "off"] = Field(
        "all",
        description="With push.uri, the run itself is saved while it runs, for --resume-from on another machine: `all`, `without_states`, `off`",
    )
    backup_uri: str | None = Field(
        None, description="Where the run itself is saved; None is beside push.uri, with `.run` added to its name, unless that is this disk"
    )
    backup_minutes: float = Field(10, gt=0, description="Minutes between two saves of the run: what a lost machine can cost")


class RentalSettings(Section):
    machine: str = Field("this machine", description="Name of the machine for the ledger and the report")
    price_per_hour: float = Field(0.0, ge=0, description="What an hour costs, for the cost in the ledger")
    prices: dict[str, PositiveFloat] = Field({}, description="What an hour of other machines costs (8x-h200 = 30), for `plan`")
    currency: str = Field("USD", description="Currency of the prices")
    spot_price_per_hour: float = Field(
        0.0, ge=0, description="What an hour of the same machine costs where it can be taken away; for `plan`"
    )
    interruptions_per_day: float = Field(
        2.0, ge=0, description="How often such a machine is taken away, for `plan`; a guess until your provider says"
    )
    deadline: AwareDatetime | None = Field(
        None, description="When the machine goes back (2026-03-01T18:00:00Z): the run saves and stops in time, exit code 75"
    )
    spending_limit: float | None = Field(
        None, gt=0, description="Most that the run may cost over all its starts: it saves and stops in time, exit code 78"
    )
    reserve_minutes: float = Field(15, ge=0, description="Minutes kept before the deadline and the spending limit for saving and pushing")
    on_finish: str | None = Field(
        None, description="Shell command after the verified push, and after a failure and hold_minutes; e.g. the provider's shutdown"
    )
    hold_minutes: float = Field(
        60, ge=0, description="Minutes that the machine of a failed run is kept for somebody to look, before on_finish"
    )
    stall_minutes: float = Field(30, gt=0, description="No file of the run written for so long is told to the webhook as `stalled`")
    webhook_variable: str = Field(
        "EAGLE3_WEBHOOK",
        description="Environment variable with a URL told of done, failed, interrupted, stalled; a URL can be a secret, so it stands in no settings",
    )


class Settings(Section):
    job: JobSettings = JobSettings()
    verifier: VerifierSettings = VerifierSettings()
    prompts: PromptsSettings = PromptsSettings()
    generate: GenerateSettings = GenerateSettings()
    states: StatesSettings = StatesSettings()
    vocab: VocabSettings = VocabSettings()
    heads: HeadsSettings = HeadsSettings()
    gate: GateSettings = GateSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    package: PackageSettings = PackageSettings()
    push: PushSettings = PushSettings()
    rental: RentalSettings = RentalSettings()

    def value(self, key: str) -> Any:
        """The value at a dotted key in JSON's types: `value("train.epochs")`, a section or a list of tables as well."""
        found: Any = self
        for part in key.split("."):
            found = getattr(found, part)
        return to_jsonable_python(found)

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @model_validator(mode="after")
    def _cross_checks(self) -> "Settings":
        from jobs.contradictions import contradictions

        problems = contradictions(self)
        if problems:
            raise ValueError("; ".join(problems))
        return self
