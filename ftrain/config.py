"""The whole configuration of a run, on one page.

A config is data, not code: the supervisor re-reads it after a crash, on another node, without importing the trainer, and
its fingerprint says whether it changed. TOML in, these Structs as the schema, canonical JSON as the record; unknown keys are
errors.
Precedence, all of it: the defaults below, then the TOML file, then `--set a.b=v`. No environment variables.

Each field says what may happen to it when an existing run is resumed with another value:

- FREE      takes effect, nothing to say (how the run is watched, logged, paced).
- RECORDED  takes effect, and the change stands in the ledger (layout, learning rate, intervals).
- ACCEPT    changes what is being trained: refused unless `--accept-change` is given, then recorded.
- REFUSED   would make the saved state meaningless: start a new run instead.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

FREE = {"on_resume": "free"}
RECORDED = {"on_resume": "recorded"}
ACCEPT = {"on_resume": "accept"}
REFUSED = {"on_resume": "refused"}

Axis = Literal["tp", "cp", "pp", "dp"]
Recompute = Literal["none", "selective", "full"]
CpExchange = Literal["all_gather", "ring"]
Sharding = Literal["zero1", "fsdp", "hsdp", "hfsdp"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"]
FaultPoint = Literal[
    "step", "gradients", "copy", "restore", "upload", "before_manifest", "after_manifest", "before_commit", "after_commit"
]
FaultKind = Literal[
    "kill", "segv", "abort", "stop", "exit", "raise", "import", "oom", "loop", "lock", "part", "slow", "nan", "flip"
]

MOST_LAYERS, MOST_PARTS, MOST_RANKS, MOST_SEQUENCES = 2**13, 2**16, 2**20, 2**24
"""Of what is planned one by one (parts of a model, ranks, sequences of an update): a slip beyond takes hours to answer."""


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: immutable, keyword-only, strict."""


class Run(Section, frozen=True, kw_only=True):
    """What is run, and where its checkpoints and ledger live."""

    url: Annotated[str, Meta(min_length=1, description="folder or URL (s3://bucket/key) of the run", extra=FREE)]
    steps: Annotated[
        int,
        Meta(
            ge=1,
            description="optimizer steps of the whole run; another number reshapes the learning rate's curve (cosine, wsd)",
            extra=RECORDED,
        ),
    ]
    seed: Annotated[int, Meta(ge=0, lt=2**62, description="seed of initial values and data order", extra=REFUSED)] = 0
    local_dir: Annotated[
        str,
        Meta(
            description="folder on a local disk, of this run alone, for logs, sockets and the ledger's open segment; empty: "
            "inside `url` if that is a local folder, else a per-user cache folder",
            extra=FREE,
        ),
    ] = ""


class Model(Section, frozen=True, kw_only=True):
    """A Llama-style decoder. Sizes are numbers of elements."""

    layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS, description="number of decoder layers", extra=REFUSED)]
    hidden: Annotated[int, Meta(ge=1, description="width of the residual stream", extra=REFUSED)]
    heads: Annotated[int, Meta(ge=1, le=MOST_PARTS, description="number of query heads", extra=REFUSED)]
    kv_heads: Annotated[
        int, Meta(ge=0, le=MOST_PARTS, description="number of key/value heads; 0: as many as heads", extra=REFUSED)
    ] = 0
    head_dim: Annotated[int, Meta(ge=0, description="size of a head; 0: hidden / heads", extra=REFUSED)] = 0
    ffn: Annotated[int, Meta(ge=1, description="inner width of the SwiGLU block, or of each expert", extra=REFUSED)]
    experts: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST_PARTS,
            description="experts of each layer, among which a router chooses; 0: a dense model",
            extra=REFUSED,
        ),
    ] = 0
    experts_per_token: Annotated[int, Meta(ge=1, description="with experts: how many compute a token", extra=ACCEPT)] = 2
    balance_coef: Annotated[
        float,
        Meta(ge=0, description="with experts: weight of the balance loss of each sequence in what is learned", extra=ACCEPT),
    ] = 0.01
    capacity: Annotated[
        float,
        Meta(
            ge=0,
            description="with experts: an expert takes at most capacity x seq_len x experts_per_token / experts tokens of a "
            "sequence, rounded up, the first ones; 0: all (dropless)",
            extra=ACCEPT,
        ),
    ] = 0.0
    vocab: Annotated[int, Meta(ge=2, description="vocabulary size, unpadded", extra=REFUSED)]
    tied: Annotated[bool, Meta(description="output head shares the embedding matrix", extra=REFUSED)] = False
    rope_base: Annotated[float, Meta(gt=0, description="base of the rotary position angles", extra=ACCEPT)] = 500_000.0
    qk_norm: Annotated[
        bool, Meta(description="RMSNorm on each head's queries and keys, before the rotation", extra=REFUSED)
    ] = False
    z_loss: Annotated[
        float,
        Meta(ge=0, description="weight of the squared log of the softmax's denominator in what is learned", extra=ACCEPT),
    ] = 0.0
    norm_eps: Annotated[float, Meta(gt=0, description="epsilon of RMSNorm", extra=ACCEPT)] = 1e-5
    init_std: Annotated[float, Meta(gt=0, description="standard deviation of initial matrices", extra=REFUSED)] = 0.02


class Source(Section, frozen=True, kw_only=True):
    """One corpus of a blend."""

    path: Annotated[
        str, Meta(min_length=1, description="prefix of a .bin/.idx pair, or `stdlib`: the interpreter's own library")
    ]
    weight: Annotated[float, Meta(gt=0, description="share of the blend, relative to the other sources")] = 1.0


class Skip(Section, frozen=True, kw_only=True):
    """Updates whose data are passed over: `first` and those after it read what would have come after the data of `last`."""

    first: Annotated[int, Meta(ge=1, description="number of the first update", extra=ACCEPT)]
    last: Annotated[int, Meta(ge=1, description="number of the last one", extra=ACCEPT)]


class Data(Section, frozen=True, kw_only=True):
    """Where the tokens come from. The order is a pure function of (seed, position)."""

    sources: Annotated[tuple[Source, ...], Meta(min_length=1, description="corpora, blended by weight", extra=ACCEPT)]
    tokenizer: Annotated[str, Meta(min_length=1, description="`byte`, a tokenizer.json or a .tiktoken file", extra=REFUSED)] = (
        "byte"
    )
    seq_len: Annotated[int, Meta(ge=1, description="tokens in a training sequence", extra=ACCEPT)]
    heldout_fraction: Annotated[
        float, Meta(ge=0, lt=1, description="share of each corpus, at its end, kept for evaluation", extra=ACCEPT)
    ] = 0.01
    isolate_documents: Annotated[
        bool, Meta(description="the last token of a document does not learn the first of the next", extra=ACCEPT)
    ] = True
    document_mask: Annotated[
        bool, Meta(description="attention does not look into another document of the same sequence", extra=ACCEPT)
    ] = False
    skip: Annotated[
        tuple[Skip, ...],
        Meta(
            description="ranges of updates whose data are passed over, e.g. because they make no sense; a run that is behind "
            "one already goes back to before it",
            extra=ACCEPT,
        ),
    ] = ()


class Ramp(Section, frozen=True, kw_only=True):
    """A smaller batch for the beginning of a run."""

    tokens: Annotated[int, Meta(ge=1, description="updates that begin before this many tokens of the run")]
    global_batch: Annotated[int, Meta(ge=1, le=MOST_SEQUENCES, description="take this many sequences")]


class Batch(Section, frozen=True, kw_only=True):
    """How many sequences make one update. Replicas may take unequal numbers of micro-batches."""

    global_batch: Annotated[
        int, Meta(ge=1, le=MOST_SEQUENCES, description="sequences in one update, over all replicas", extra=ACCEPT)
    ]
    micro_batch: Annotated[
        int, Meta(ge=1, le=MOST_SEQUENCES, description="sequences in one forward pass of a replica", extra=RECORDED)
    ] = 1
    ramp: Annotated[
        tuple[Ramp, ...],
        Meta(description="other batches before global_batch, each up to a number of tokens; empty: none", extra=ACCEPT),
    ] = ()


class Parallel(Section, frozen=True, kw_only=True):
    """How the model is cut. DP is what remains of the ranks: it is derived, never typed."""

    ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS, description="number of ranks over all nodes", extra=RECORDED)] = 1
    tp: Annotated[int, Meta(ge=1, description="tensor parallel size", extra=RECORDED)] = 1
    cp: Annotated[int, Meta(ge=1, description="context parallel size", extra=RECORDED)] = 1
    pp: Annotated[int, Meta(ge=1, description="pipeline parallel size", extra=RECORDED)] = 1
    ep: Annotated[
        int,
        Meta(
            ge=1,
            description="with experts: so many neighbours of DP x CP share them out; a view on these ranks, which multiplies "
            "nothing",
            extra=RECORDED,
        ),
    ] = 1
    order: Annotated[tuple[Axis, ...], Meta(description="rank order, innermost axis first", extra=RECORDED)] = (
        "tp",
        "cp",
        "pp",
        "dp",
    )
    sp: Annotated[
        bool,
        Meta(
            description="with tp > 1: cut what lies between the blocks along the sequence (data.seq_len must divide)",
            extra=RECORDED,
        ),
    ] = True
    sp_regather: Annotated[
        bool,
        Meta(description="with sp: gather inputs of matrices again in backward instead of keeping them whole", extra=RECORDED),
    ] = True
    tp_overlap: Annotated[
        bool, Meta(description="hide tp collectives of backward behind its matmuls; the same bits either way", extra=RECORDED)
    ] = False
    cp_exchange: Annotated[
        CpExchange,
        Meta(
            description="with cp > 1, how attention sees keys and values of other ranks: all of a layer at once, or one block "
            "after the other in 1/cp of the memory",
            extra=RECORDED,
        ),
    ] = "all_gather"
    sharding: Annotated[
        Sharding,
        Meta(
            description="what the replicas (DP x CP) share: masters and moments (zero1), weights and gradients as well (fsdp), "
            "all of it within inner groups (hsdp), or weights and gradients within and masters and moments over all (hfsdp)",
            extra=RECORDED,
        ),
    ] = "zero1"
    fsdp_inner: Annotated[
        int, Meta(ge=1, description="hsdp, hfsdp: replicas of an inner group, neighbours", extra=RECORDED)
    ] = 1
    bucket_mib: Annotated[float, Meta(gt=0, description="bf16 MiB of a gradient bucket", extra=RECORDED)] = 64.0
    schedule: Annotated[
        PipelineSchedule,
        Meta(description="order of the pipeline's work; zb_v puts two stages on each rank, there and back", extra=RECORDED),
    ] = "1f1b"
    virtual_stages: Annotated[
        int,
        Meta(ge=1, le=MOST_PARTS, description="stages of a pipeline rank; more than one with interleaved", extra=RECORDED),
    ] = 1
    layer_counts: Annotated[
        tuple[int, ...],
        Meta(description="layers of each (virtual) stage, in order; empty: as even as can be, the ends last", extra=RECORDED),
    ] = ()
    recompute: Annotated[
        Recompute,
        Meta(
            description="what backward does again instead of keeping it: nothing, the core of attention, or whole layers; the "
            "same bits",
            extra=RECORDED,
        ),
    ] = "none"
    overlap_reduce: Annotated[
        bool, Meta(description="sum gradients over the replicas beside the last backward; the same bits", extra=RECORDED)
    ] = False
    overlap_gather: Annotated[
        bool, Meta(description="gather new weights beside the next forward; the same bits", extra=RECORDED)
    ] = False


class Optimizer(Section, frozen=True, kw_only=True):
    """AdamW on fp32 masters."""

    lr: Annotated[float, Meta(gt=0, description="peak learning rate", extra=RECORDED)]
    beta1: Annotated[float, Meta(ge=0, lt=1, description="decay of the first moment", extra=RECORDED)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="decay of the second moment", extra=RECORDED)] = 0.95
    eps: Annotated[float, Meta(gt=0, description="added to the root of the second moment", extra=RECORDED)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0, description="on matrices; never on norms", extra=RECORDED)] = 0.1
    clip_norm: Annotated[float, Meta(ge=0, description="largest global gradient norm; 0: no clipping", extra=RECORDED)] = 1.0


class Schedule(Section, frozen=True, kw_only=True):
    """The learning rate over the steps."""

    kind: Annotated[Literal["cosine", "wsd", "constant"], Meta(description="shape after the warm-up", extra=RECORDED)] = (
        "cosine"
    )
    warmup_steps: Annotated[int, Meta(ge=0, description="steps of linear warm-up", extra=RECORDED)] = 0
    decay_steps: Annotated[int, Meta(ge=0, description="wsd: steps of the final decay", extra=RECORDED)] = 0
    min_ratio: Annotated[float, Meta(ge=0, le=1, description="final learning rate over the peak", extra=RECORDED)] = 0.1


class Evaluate(Section, frozen=True, kw_only=True):
    """Loss on a fixed held-out slice, the same under every layout."""

    every_steps: Annotated[int, Meta(ge=0, description="evaluate every so many steps; 0: never", extra=RECORDED)] = 0
    sequences: Annotated[int, Meta(ge=1, description="held-out sequences in the slice", extra=RECORDED)] = 64


class KeepLast(Section, frozen=True, kw_only=True, tag_field="keep", tag="last"):
    """Keep the newest n checkpoints."""

    n: Annotated[int, Meta(ge=1, description="how many")] = 3


class KeepEvery(Section, frozen=True, kw_only=True, tag_field="keep", tag="every"):
    """Keep checkpoints whose step is a multiple."""

    steps: Annotated[int, Meta(ge=1, description="multiple of this many steps")]


class KeepBest(Section, frozen=True, kw_only=True, tag_field="keep", tag="best"):
    """Keep the n checkpoints with the lowest evaluation loss."""

    n: Annotated[int, Meta(ge=1, description="how many")] = 1


class KeepPinned(Section, frozen=True, kw_only=True, tag_field="keep", tag="pinned"):
    """Keep named checkpoints."""

    steps: Annotated[tuple[int, ...], Meta(min_length=1, description="their steps")]


class KeepYoung(Section, frozen=True, kw_only=True, tag_field="keep", tag="young"):
    """Keep checkpoints of the last hours."""

    hours: Annotated[float, Meta(gt=0, description="how old they may be")]


class Checkpoint(Section, frozen=True, kw_only=True):
    """When state is copied to memory, when it goes to storage, and what is kept."""

    snapshot_steps: Annotated[
        int, Meta(ge=0, description="copy to the memory tier every so many steps; 0: never", extra=FREE)
    ] = 10
    every_steps: Annotated[
        int, Meta(ge=0, description="write to storage every so many steps; 0: only at the end", extra=FREE)
    ] = 100
    slots: Annotated[int, Meta(ge=2, le=3, description="arena slots of each rank", extra=FREE)] = 3
    overlap: Annotated[
        bool,
        Meta(
            description="copy beside the next forward and backward instead of before them; the same bits either way. Pays "
            "where the copy has a core or a copy engine of its own",
            extra=FREE,
        ),
    ] = False
    weights: Annotated[
        bool,
        Meta(
            description="store the weights besides the masters that they are rounded from: 2 of 14 bytes a parameter. Without "
            "them every load, sample and export rounds the masters, and gets the same bits",
            extra=FREE,
        ),
    ] = True
    peer_copy: Annotated[
        bool,
        Meta(
            description="each node keeps a copy of another node's newest snapshot in memory, so that the loss of a node costs "
            "no reading from storage. Needs several nodes (machine.ranks_per_node), 3 slots, memory for 2 more slots a rank",
            extra=FREE,
        ),
    ] = False
    if_busy: Annotated[
        Literal["wait", "skip", "fail"],
        Meta(description="what a save does while the previous upload still runs", extra=FREE),
    ] = "wait"
    if_failed: Annotated[Literal["continue", "stop"], Meta(description="what a failed save does to the run", extra=FREE)] = (
        "continue"
    )
    compression: Annotated[
        Literal["none", "lz4", "zstd"],
        Meta(
            description="lossless compression of what goes to `run.url`, for a link that carries less than a core compresses; "
            "the memory and local tiers stay as they are. Trained numbers shrink by a sixth (guides/s3.md)",
            extra=FREE,
        ),
    ] = "none"
    compression_level: Annotated[
        int, Meta(ge=1, le=9, description="more processor time (zstd above 5: very much more), hardly fewer bytes", extra=FREE)
    ] = 5
    upload_mib_s: Annotated[
        float, Meta(ge=0, description="rate that all uploads of a process keep to together, MiB/s; 0: no limit", extra=FREE)
    ] = 0.0
    local_url: Annotated[
        str,
        Meta(
            description="folder on a fast local disk: a tier of checkpoints between memory and `run.url`; empty: none. "
            "All ranks must see it. The newest two are kept; losing it is harmless",
            extra=FREE,
        ),
    ] = ""
    local_every_steps: Annotated[
        int, Meta(ge=0, description="write to `local_url` every so many steps; 0: never", extra=FREE)
    ] = 0
    mirror_url: Annotated[
        str,
        Meta(
            description="a second place that each committed checkpoint is copied to, and verified there; empty: none. It falls "
            "behind rather than hold up the run, and what it lacks is no failure of a save",
            extra=FREE,
        ),
    ] = ""
    retention: Annotated[
        tuple[KeepLast | KeepEvery | KeepBest | KeepPinned | KeepYoung, ...],
        Meta(description="a checkpoint is kept if any of these keeps it; empty: everything is kept", extra=FREE),
    ] = (KeepLast(n=3),)
    grace_s: Annotated[
        float, Meta(ge=0, description="packs outlive their deleted commit so many seconds, while there is room", extra=FREE)
    ] = 3600.0


class Storage(Section, frozen=True, kw_only=True):
    """How remote storage is reached. What is empty comes from AWS's variables and files; so do credentials, never from here."""

    backend: Annotated[
        Literal["auto", "obstore", "s3fs"],
        Meta(description="client library; auto: obstore if it is installed and can do what is asked, else s3fs", extra=FREE),
    ] = "auto"
    endpoint: Annotated[str, Meta(description="URL of an S3 server that is not AWS", extra=FREE)] = ""
    region: Annotated[str, Meta(description="region of the bucket", extra=FREE)] = ""
    profile: Annotated[str, Meta(description="profile of the AWS configuration files", extra=FREE)] = ""
    ca_bundle: Annotated[str, Meta(description="file with the certificates to trust", extra=FREE)] = ""
    proxy: Annotated[str, Meta(description="URL of an HTTP proxy", extra=FREE)] = ""
    addressing: Annotated[
        Literal["auto", "path", "virtual"], Meta(description="where the bucket's name stands in a URL", extra=FREE)
    ] = "auto"
    sse: Annotated[
        Literal["", "AES256", "aws:kms"], Meta(description="server-side encryption of what is written", extra=FREE)
    ] = ""
    sse_kms_key_id: Annotated[str, Meta(description="key for aws:kms; empty: the bucket's", extra=FREE)] = ""
    request_timeout_s: Annotated[float, Meta(gt=0, description="a request that takes longer counts as lost", extra=FREE)] = (
        120.0
    )
    in_flight_mib: Annotated[
        float,
        Meta(ge=1, description="bytes on their way that all saves, loads and copies of a process share, MiB", extra=FREE),
    ] = 64.0
    lease_s: Annotated[
        float,
        Meta(ge=10, description="a run that nobody renewed for this long may be taken over from another host", extra=FREE),
    ] = 120.0


class Recovery(Section, frozen=True, kw_only=True):
    """How often and how fast the supervisor tries again."""

    max_restarts: Annotated[int, Meta(ge=0, description="restarts without a new highest step before giving up", extra=FREE)] = 3
    backoff_s: Annotated[
        float, Meta(ge=0, description="first wait after a repeated failure, doubled each time", extra=FREE)
    ] = 1.0
    backoff_max_s: Annotated[float, Meta(ge=0, description="longest such wait", extra=FREE)] = 60.0
    unknown_restarts: Annotated[
        int, Meta(ge=0, description="the same as max_restarts, of interruptions nobody can explain", extra=FREE)
    ] = 2
    same_failure: Annotated[
        int, Meta(ge=0, description="restarts after the program failed alike at the same step", extra=FREE)
    ] = 2
    outage_wait_s: Annotated[
        float, Meta(ge=0, description="first wait when something outside must recover, doubled each time", extra=FREE)
    ] = 30.0
    outage_max_s: Annotated[float, Meta(ge=0, description="longest such wait", extra=FREE)] = 900.0
    outage_restarts: Annotated[
        int, Meta(ge=0, description="restarts without progress while something outside is down", extra=FREE)
    ] = 20
    jitter: Annotated[
        float,
        Meta(ge=0, le=1, description="a wait is stretched by up to this share: many runs do not return at once", extra=FREE),
    ] = 0.1
    quarantine_s: Annotated[
        float, Meta(ge=0, description="a blamed node is left out for this long, doubled with each further blame", extra=FREE)
    ] = 3600.0
    quarantine_max_s: Annotated[float, Meta(ge=0, description="longest such time", extra=FREE)] = 604_800.0
    flap_s: Annotated[
        float, Meta(ge=0, description="a network fault counts against a place if it comes twice within this time", extra=FREE)
    ] = 300.0
    breaker_share: Annotated[
        float, Meta(ge=0, le=1, description="never more than this share of nodes or places is left out at once", extra=FREE)
    ] = 0.25
    elastic: Annotated[
        bool,
        Meta(
            description="when places are lost and no spare is left, go on with the layout of best predicted tokens/s (of least "
            "work for the busiest rank, where no peak is known) for what is left: same batches, same data; and grow again when "
            "they are back",
            extra=FREE,
        ),
    ] = True
    least_ranks: Annotated[
        int, Meta(ge=1, description="the run stops rather than go on with fewer ranks than this", extra=FREE)
    ] = 1
    spares: Annotated[
        int,
        Meta(ge=0, description="places of this machine kept warm beyond parallel.ranks, to take a lost one's part", extra=FREE),
    ] = 0
    layout_hold_s: Annotated[
        float,
        Meta(
            ge=0,
            description="a layout is kept at least this long before the run is interrupted to grow onto a place or a node that "
            "is back by itself; `ftrain admit` acts at once",
            extra=FREE,
        ),
    ] = 60.0
    straggler: Annotated[
        Literal["report", "restart", "exclude"],
        Meta(
            description="what is done about a rank that computes much longer than the median for several windows in a row: "
            "nothing, new processes at the next step boundary, or its place left out for quarantine_s",
            extra=FREE,
        ),
    ] = "report"
    straggler_factor: Annotated[
        float, Meta(gt=1, description="so many times the median's computing time make a straggler", extra=FREE)
    ] = 1.5
    straggler_windows: Annotated[
        int, Meta(ge=1, description="windows of 20 steps in a row after which it is one", extra=FREE)
    ] = 3
    notice: Annotated[
        str,
        Meta(
            description="file, or http URL, that says when the machine is taken away (forms: docs/recovery.md); empty: none",
            extra=FREE,
        ),
    ] = ""
    notice_poll_s: Annotated[
        float, Meta(gt=0, description="how often notices and the scheduler's time limit are looked at", extra=FREE)
    ] = 5.0
    end_margin_s: Annotated[
        float, Meta(ge=0, description="time kept free, before a known end, beyond what a step and a save take", extra=FREE)
    ] = 30.0
    nonfinite_steps: Annotated[
        int,
        Meta(
            ge=0, description="consecutive steps that are not finite, also when repeated, end the attempt; 0: never", extra=FREE
        ),
    ] = 3
    spike_z: Annotated[
        float, Meta(ge=0, description="robust deviations above the usual loss that count as a spike; 0: none does", extra=FREE)
    ] = 10.0
    spike_steps: Annotated[int, Meta(ge=1, description="consecutive spikes that end the attempt", extra=FREE)] = 10
    replay_norm: Annotated[
        float,
        Meta(
            ge=0,
            description="a gradient norm so many times the usual makes a step suspect: it is done again before it is applied; "
            "0: never",
            extra=FREE,
        ),
    ] = 20.0
    skip_updates: Annotated[
        int,
        Meta(
            ge=0,
            description="updates whose data may be passed over in the whole run: if the same ones make no sense twice, on the "
            "same data, it is the data or the code; 0: the run stops for a person then",
            extra=FREE,
        ),
    ] = 0
    corruption: Annotated[
        Literal["report", "exclude"],
        Meta(
            description="what is done about a rank that computed something else when its step was repeated: its place is left "
            "out for quarantine_s (if breaker_share and the layouts allow it), or nothing",
            extra=FREE,
        ),
    ] = "exclude"
    metrics_port: Annotated[
        int, Meta(ge=0, le=65_535, description="loopback port that serves metrics to Prometheus; 0: none", extra=FREE)
    ] = 0
    webhook: Annotated[
        str, Meta(description="URL that is told, as JSON, when the run has stopped for a person; empty: none", extra=FREE)
    ] = ""
    webhook_s: Annotated[float, Meta(gt=0, description="longest time that this may take", extra=FREE)] = 10.0
    hang_s: Annotated[
        float, Meta(gt=0, description="no progress of a rank for this long is a hang, whatever was learned", extra=FREE)
    ] = 300.0
    hang_floor_s: Annotated[
        float, Meta(gt=0, description="shortest learned limit (5 times the slowest step, save or evaluation)", extra=FREE)
    ] = 60.0
    start_s: Annotated[float, Meta(gt=0, description="longest time from launch to the first step", extra=FREE)] = 600.0
    stop_s: Annotated[float, Meta(gt=0, description="time a stopping run has to finish its step and save", extra=FREE)] = 120.0
    lease_s: Annotated[
        float, Meta(gt=0, description="an agent without coordinator for this long ends its workers", extra=FREE)
    ] = 60.0
    collective_s: Annotated[float, Meta(gt=0, description="time limit of a collective", extra=FREE)] = 120.0
    nodes_s: Annotated[
        float,
        Meta(
            gt=0,
            description="longest wait for enough nodes; then the run goes on with fewer, if `elastic`, or ends with code 11",
            extra=FREE,
        ),
    ] = 600.0


class Fault(Section, frozen=True, kw_only=True):
    """A fault to inject, for demonstrations and tests. It fires once in the life of a run."""

    kind: Annotated[
        FaultKind,
        Meta(
            description="what happens to the process; nan, flip: to a gradient; slow: each forward takes 50 ms longer; "
            "oom: until a memory cgroup ends it; part: one collective more than the others"
        ),
    ] = "kill"
    text: Annotated[str, Meta(description="for raise: the words of the exception; empty: some of our own")] = ""
    at: Annotated[
        FaultPoint,
        Meta(description="named point at which it happens; `step`: between two steps, `gradients`: before they are voted on"),
    ] = "step"
    step: Annotated[int, Meta(ge=0, description="at or after this step")]
    rank: Annotated[int, Meta(ge=0, description="rank, for points inside a worker")] = 0


class Machine(Section, frozen=True, kw_only=True):
    """How the ranks use the machine at hand."""

    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto: cuda if there is one", extra=RECORDED)] = "auto"
    threads: Annotated[int, Meta(ge=1, description="CPU threads of a rank", extra=RECORDED)] = 1
    compute_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float64"],
        Meta(description="dtype of activations; auto: bfloat16 where the hardware has it, else float32", extra=RECORDED),
    ] = "auto"
    compile: Annotated[
        bool,
        Meta(
            description="norm, rotation and gate of each block through torch.compile, at the start of an attempt (on CPU it "
            "needs a C++ compiler); other last bits",
            extra=RECORDED,
        ),
    ] = False
    interface: Annotated[
        str,
        Meta(
            description="network interface of collectives and control plane; several, separated by commas: the first that a "
            "node has",
            extra=FREE,
        ),
    ] = "lo"
    ranks_per_node: Annotated[
        int, Meta(ge=0, description="ranks (GPUs) of each node; 0: all ranks are on one machine", extra=FREE)
    ] = 0
    shared_dir: Annotated[
        str,
        Meta(
            description="with ranks_per_node: folder that all nodes see, for the run's key and the coordinator's address; "
            "empty: the run's local folder",
            extra=FREE,
        ),
    ] = ""
    port: Annotated[
        int, Meta(ge=0, le=65_535, description="port at which the coordinator waits for the nodes; 0: any", extra=FREE)
    ] = 0
    hardware: Annotated[
        str,
        Meta(
            description="profile of the hardware, for plans and MFU: the name of one that ships, or a .toml file; empty: "
            "unknown, so no MFU",
            extra=FREE,
        ),
    ] = ""
    profile_steps: Annotated[
        tuple[int, ...],
        Meta(description="first and last step that torch.profiler traces on every rank; empty: none", extra=FREE),
    ] = ()


class Slurm(Section, frozen=True, kw_only=True):
    """What `ftrain submit` asks Slurm for. Empty values are left to the cluster."""

    nodes: Annotated[
        int, Meta(ge=0, description="nodes of the job; 0: parallel.ranks / machine.ranks_per_node, and spare_nodes", extra=FREE)
    ] = 0
    spare_nodes: Annotated[int, Meta(ge=0, description="nodes beyond what the ranks need, held warm", extra=FREE)] = 0
    partition: Annotated[str, Meta(description="partition", extra=FREE)] = ""
    account: Annotated[str, Meta(description="account", extra=FREE)] = ""
    qos: Annotated[str, Meta(description="quality of service", extra=FREE)] = ""
    time: Annotated[
        str,
        Meta(
            pattern=r"^(|[0-9]+|([0-9]+-)?[0-9]+(:[0-9]+){0,2})$",
            examples=["60", "2-00:00:00"],
            description="time limit as Slurm writes it",
            extra=FREE,
        ),
    ] = ""
    signal_s: Annotated[
        int, Meta(ge=0, le=65_535, description="SIGUSR1 so many seconds before the end; 0: none", extra=FREE)
    ] = 300
    requeue: Annotated[
        bool, Meta(description="a job whose time or node is taken away goes back into the queue, and goes on", extra=FREE)
    ] = True
    container_image: Annotated[str, Meta(description="image of Pyxis/Enroot that the ranks run in", extra=FREE)] = ""
    container_mounts: Annotated[
        tuple[str, ...], Meta(description='what the container sees: "/from:/to[:flags]"', extra=FREE)
    ] = ()
    sbatch: Annotated[
        tuple[str, ...], Meta(description='further options of sbatch: "--exclusive", "--gpus-per-node=8"', extra=FREE)
    ] = ()
    srun: Annotated[tuple[str, ...], Meta(description="further options of the srun that starts the nodes", extra=FREE)] = ()


class Certify(Section, frozen=True, kw_only=True):
    """What `ftrain certify` compares with one process if the command line does not say."""

    layouts: Annotated[
        tuple[str, ...],
        Meta(description='layouts such as "tp=2,pp=2,schedule=zb_v"; names with a dot change other sections', extra=FREE),
    ] = ()


class Phase(Section, frozen=True, kw_only=True):
    """From some token of the run on, other values: sub-tables named like the sections. What a phase does not name stays as it
    was before. The run changes over at the first step boundary at or behind that token, through a checkpoint of its own.
    """

    from_tokens: Annotated[
        int,
        Meta(ge=1, description="updates that begin at or behind this many tokens of the run (whole sequences) belong to it"),
    ]
    data: Annotated[
        dict[str, Any], Meta(description="other `seq_len`, `sources` (all of them), `isolate_documents`, `document_mask`")
    ] = {}
    batch: Annotated[dict[str, Any], Meta(description="other `global_batch`, `micro_batch`")] = {}
    parallel: Annotated[dict[str, Any], Meta(description="another layout: any of [parallel]")] = {}
    optimizer: Annotated[dict[str, Any], Meta(description="any of [optimizer]; another `lr` is another peak of the curve")] = {}
    schedule: Annotated[
        dict[str, Any],
        Meta(
            description="a new curve of the learning rate from the phase's first update on, to the next phase with a "
            "schedule or the end; what is not named has [schedule]'s default"
        ),
    ] = {}
    model: Annotated[dict[str, Any], Meta(description="another `rope_base`")] = {}
    evaluate: Annotated[dict[str, Any], Meta(description="any of [evaluate]")] = {}


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    run: Run
    model: Model
    data: Data
    batch: Batch
    optimizer: Optimizer
    parallel: Parallel = Parallel()
    schedule: Schedule = Schedule()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    storage: Storage = Storage()
    recovery: Recovery = Recovery()
    machine: Machine = Machine()
    slurm: Slurm = Slurm()
    certify: Certify = Certify()
    phases: Annotated[
        tuple[Phase, ...],
        Meta(description="other values from some token on; past ones cannot be changed any more", extra=RECORDED),
    ] = ()
    faults: Annotated[tuple[Fault, ...], Meta(description="faults to inject", extra=FREE)] = field(default=())


def canonical(config: Config) -> bytes:
    """The config as canonical JSON: sorted keys, every default written out."""
    return msgspec.json.encode(config, order="sorted")
