"""The columns of the tables that one room writes and another reads, named once.

Every program of assignment 4 (benchmark, sweep, text training) writes the same tables, so that a
cause is looked for in the same place whatever was run. None says what was done to a run: only what
was counted and timed. One row per rank unless said otherwise; times in ms, sizes in bytes.
"""

from __future__ import annotations

WITNESS_COLUMNS = (
    "stage",
    "round",
    "rank",
    "host",
    "witness_ms",
    "span_s",
    "others_share",
    "steal_share",
    "idle_share",
    "load_1min",
)
"""``witness.csv`` of every program: a row per rank at the beginning of each round and after the
last one, ``stage`` the loop whose rounds they are, or ``run`` at the run's beginning and end.
``witness_ms`` is a fixed computation. Shares are those of the cores' time, in ``span_s`` seconds
since the last row that has some, that processes other than this run's had, that a hypervisor gave
away and that nobody wanted. They are blank where the system does not tell, or the span is short.
``load_1min`` is the load average."""

ARM_COLUMNS = (
    "arm",
    "regime",
    "world_size",
    "batch_per_rank",
    "global_batch",
    "accumulation",
    "compression",
    "bucket_cap_mb",
    "precision",
    "change",
)
"""``arms.csv``: what is compared, one row per arm. ``regime`` is strong, weak or empty;
``batch_per_rank`` is of one micro-batch; ``global_batch`` = ranks × accumulation × batch_per_rank;
``change`` is ``none`` or what was changed, such as ``accumulation=4``, on one rank and on all."""

STEP_COLUMNS = (
    "rank",
    "arm",
    "kind",
    "round",
    "epoch",
    "step",
    "warmup",
    "samples",
    "tokens",
    "padded_tokens",
    "longest",
    "micro_batches",
    "exchanged_bytes",
    "step_time_ms",
    "data_time_ms",
    "forward_time_ms",
    "backward_time_ms",
    "waiting_time_ms",
    "communication_time_ms",
    "optimizer_time_ms",
    "between_time_ms",
    "cpu_time_ms",
)
"""``steps.csv``: one row per rank and step. ``kind`` is ``timed`` (DDP with its buckets watched) or
``plain`` (DDP as it is: only ``step_time_ms`` is known, the parts are blank). Data to optimizer are
parts of the step; ``between_time_ms`` is the time between the step before and this one (logging),
blank for the first of an epoch. ``backward_time_ms`` is computation until this rank's gradients
were ready, ``communication_time_ms`` the part of the exchange that followed it and that nobody
waited for, ``exchanged_bytes`` the bytes that went through all-reduces during the step."""

BUCKET_COLUMNS = (
    "rank",
    "arm",
    "round",
    "step",
    "bucket",
    "size_bytes",
    "ready_time_ms",
    "done_time_ms",
)
"""``buckets.csv``: DDP's buckets in the order they were reduced, in the first timed steps of each
round; ms from the start of the backward pass that exchanged them. ``size_bytes`` is on the wire."""

PROBE_COLUMNS = (
    "rank",
    "arm",
    "batch_per_rank",
    "together",
    "repeat",
    "forward_time_ms",
    "backward_time_ms",
    "optimizer_time_ms",
)
"""``probes.csv``: passes without any exchange: at half, once and twice the batch; with all ranks
computing at the same time (``together`` True), or one at a time while the others wait (False)."""

EXCHANGING_COLUMNS = (
    "rank",
    "repeat",
    "iteration",
    "forward_time_ms",
    "backward_time_ms",
    "exchange_time_ms",
)
"""``passes-exchanging.csv``: passes that send their gradients in the script's own buckets, with all
ranks computing at the same time; the exchange as far as it outlasts the backward pass."""

LEAN_PASS_COLUMNS = (
    "rank",
    "without",
    "lean",
    "unused_bytes",
    "repeat",
    "forward_time_ms",
    "backward_time_ms",
)
"""``lean-passes.csv``: passes as they are and, in turns, without what they need not do
(``ddplab_watch.lean``); the bytes of gradients that no optimizer uses."""

COST_COLUMNS = ("rank", "cost", "size_bytes", "repeat", "time_ms")
"""``costs.csv``: ``copy``, ``fp16`` and ``bf16``: bringing a gradient of this size (in float32)
into a bucket and back, as it is or through a 16-bit format."""

FACT_COLUMNS = (
    "rank",
    "parameters",
    "gradient_bytes",
    "gradient_dtype",
    "compute_dtype",
    "input_shape",
    "model",
    "data",
    "data_samples",
)
"""``facts.csv``: what ran, as seen in the first step: shapes and types of tensors. ``input_shape``
is that of one sample (the longest text's tokens, or the input's width); ``data_samples`` is the
size of the data set, blank where it is endless."""
WRITTEN_FACT_COLUMNS = (*FACT_COLUMNS, "gradient_as_bucket_view")
"""As runs have written ``facts.csv`` since 2026-11-25: the last column is True where DDP's buckets
are the gradients. Readers ask for the others only, so that earlier runs open."""

PLACEMENT_COLUMNS = (
    "rank",
    "host",
    "local_rank",
    "device",
    "identity",
    "cores",
    "core_list",
    "threads",
)
"""``placement.csv``: where each rank runs. ``identity`` is the device's UUID, or the cores' list on
a CPU; ``cores`` those that the process may run on; ``threads`` those that torch computes with."""

STRATEGY_COLUMNS = (
    "strategy",
    "accumulation",
    "round",
    "iteration",
    "rank",
    "step_time_ms",
    "sent_bytes",
)
"""``strategy-times.csv`` of assignment 1: steps of strategies that take turns; ``sent_bytes`` is
what the rank sent in the step, blank where nothing counted it."""

SAMPLE_COLUMNS = (
    "arm",
    "epoch",
    "rank",
    "processed",
    "distinct",
    "shared",
    "distinct_all_ranks",
    "data_samples",
    "order",
)
"""``samples.csv``: the samples that reached the model, by identity. ``distinct``: different ones on
this rank; ``shared``: those of them that another rank had, too; ``distinct_all_ranks``: different
ones on all ranks together; ``order``: a checksum of their order. In a sweep an epoch is a visit."""

EPOCH_COLUMNS = (
    "rank",
    "epoch",
    "train_time_s",
    "evaluation_time_s",
    "epoch_time_s",
    "steps",
    "samples",
    "train_loss",
    "val_loss",
    "val_acc",
)
"""``epochs.csv`` of a training run, in seconds; ``metrics.csv`` beside it has the original's
columns. ``epoch_time_s`` is from the first step to the end of the evaluation."""

STACK_COLUMNS = ("rank", "phase", "place", "call", "samples")
"""``stacks.csv`` of a watched script: how often a phase of the loop was found at a line of the
script (``place``: file, line and function) within a library's function (``call``), at 50 looks a
second. The phase is ``loss`` from the end of the model's call to backward()."""

HOST_WAIT_COLUMNS = ("rank", "phase", "place", "call", "waits")
"""``host-waits.csv`` of a watched script on a GPU: how often the host waited for the GPU at a
line of the script, over all steps of ``steps.csv`` that have ``host_waits``, the waits of that
step. The phase is ``copy`` from a fetch to the forward pass."""

TRACE_STEP_COLUMNS = (
    "rank",
    "step",
    "step_ms",
    "computation_ms",
    "communication_ms",
    "overlap_ms",
    "exposed_communication_ms",
    "idle_ms",
    "copy_ms",
    "on_device",
)
"""``trace-steps.csv`` of a watched script under FSDP, or compiled in place: the steps that
torch.profiler recorded, taken apart (``common.traces.step_overlap``). No other table has them."""

TRACE_OPERATION_COLUMNS = (
    "rank",
    "step",
    "operation",
    "calls",
    "communication_ms",
    "exposed_ms",
)
"""``trace-operations.csv``: what these steps communicate, by operation
(``common.traces.step_overlap``)."""

STALL_COLUMNS = ("rank", "step", "seconds", "phase", "stack", "unix_s", "resumed")
"""``stalls.csv`` of a watched script: steps that did not end for long, with the stack of then, the
innermost call first; ``resumed`` says whether a later step came."""

TRIAL_COLUMNS = (
    "rank",
    "kind",
    "setting",
    "round",
    "order",
    "iteration",
    "passes",
    "step_time_ms",
)
"""``trials.csv`` of a watched script whose changes were tried: forward and backward passes with
their exchange, ``passes`` to a step; ``step_time_ms`` is per pass. The setting ``as it is`` is the
script's own, and ``as it loads`` that of kind ``workers``, whose passes each load a batch first."""

METRIC_COLUMNS = ("epoch", "train_loss", "train_time", "val_loss", "val_acc")
"""``metrics.csv``, as the original wrote it: one row per epoch; ``train_time`` in seconds."""
MICRO_BATCH_COLUMNS = (
    "step",
    "rank",
    "local_batch",
    "max_seq_len_in_batch",
    "padded_tokens",
    "step_time_ms",
    "peak_mem_mb",
    "throughput_samples_per_s",
    "throughput_tokens_per_s",
    "tokens",
    "compute_time_ms",
    "waiting_time_ms",
    "communication_time_ms",
    "planning_time_ms",
    "planning_work_ms",
    "halvings",
    "warmup",
)
"""``metrics/rank<r>.csv`` of training on micro-batches: a row per step and rank."""

MODE_RANK_COLUMNS = (
    "local_batch",
    "max_seq_len_in_batch",
    "padded_tokens",
    "tokens",
    "step_time_ms",
    "compute_time_ms",
    "waiting_time_ms",
    "communication_time_ms",
    "planning_time_ms",
    "planning_work_ms",
)
"""A rank's micro-batch in one step under a mode, and the parts of the step."""
MODE_COLUMNS = (
    *("mode", "same_batch", "step", "rank", "order", "global_batch"),
    *(*MODE_RANK_COLUMNS, "loss"),
)
"""``mode-times.csv``: a row per step, mode and rank."""
CALIBRATION_COLUMNS = ("rank", "batch_size", "longest", "repeat", "time_ms")
"""``calibration.csv``: the passes by which the cost of a micro-batch is calibrated."""
