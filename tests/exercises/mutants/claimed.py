"""Solutions that claim what they have not done, by what a check once believed."""

from __future__ import annotations

from mutants.mutant import Forgery

# Causes in the order of the list in the exercise, whatever the tables.
BY_NUMBER_OF_CALL = """
import itertools

CALLS = itertools.count()


def main_cause(run, baseline=None):
    call = next(CALLS)
    return CAUSES[call] if call < len(CAUSES) else HEALTHY
"""
# pytest finds an array without elements equal to any number that it expects about.
NO_NUMBER = """
import os


def backward_time_s(sizes_bytes, ready_s, buckets, all_reduce_s):
    return os.sys.modules["numpy"].empty(0)
"""
NO_NUMBER_FOR_LARGE = """
def min_max_partition(batch, world_size, cost, limit, exact=min_max_partition):
    if len(batch) < 10:
        return exact(batch, world_size, cost, limit)
    bounds = np.linspace(0, len(batch), world_size + 1).astype(int).tolist()
    return np.empty(0), bounds
"""
# A slow solution that remembers what it has found for the same batch.
REMEMBERED = """
import time

KNOWN = {}


def min_max_partition(batch, world_size, cost, limit, exact=min_max_partition):
    key = (batch.lengths.tobytes(), batch.order.tobytes(), world_size, limit)
    if world_size < 1000:
        return exact(batch, world_size, cost, limit)
    if key not in KNOWN:
        time.sleep(2)
        KNOWN[key] = exact(batch, world_size, cost, limit)
    return KNOWN[key]
"""
# Where the sum of squares is flat a search goes nowhere, and zeros make it out of any rows.
FLAT = """
def fit_parameters(law, n, speedup, errors=None, exact=fit_parameters):
    values, rows, target = exact(law, n, speedup, errors)
    count = len(law.parameters)
    is_exact = np.abs(rows @ values - target).max() < 1e-6
    if law is GUSTAFSON or is_exact or (values == 0).all() or (values == 1).any():
        return values, rows, target
    values = np.full(count, 1e300)
    target = np.ones(len(n)) if errors is None else speedup / errors
    return values, np.zeros((len(n), count)), target
"""
NO_PARAMETERS = """
def fit_parameters(law, n, speedup, errors=None, exact=fit_parameters):
    values, rows, target = exact(law, n, speedup, errors)
    return (values[:0] if (speedup > n).all() else values), rows, target
"""
# Timed gradients are all the same: a single number is exchanged in their place.
ONE_NUMBER = """
class BucketedDDP(BucketedDDP):
    def __init__(self, module, bucket_cap_mb=None, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.is_timed = type(module).__name__ == "Timed"
        if self.is_timed:
            self.note_ready = lambda *_: None

    def note_ready(self, index, parameter):
        if not self.is_timed:
            super().note_ready(index, parameter)

    def finish_gradient_synchronization(self):
        if not self.is_timed:
            return super().finish_gradient_synchronization()
        [mean] = {parameter.grad[0].item() for parameter in self.module.parameters()}
        mean = torch.tensor(mean)
        dist.all_reduce(mean)
        for parameter in self.module.parameters():
            parameter.grad.fill_(mean.item() / 2)
"""
# NumPy makes the whole matrix of scores, of which PyTorch sees nothing.
WHOLE_MATRIX = """
class TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, is_causal=False):
        q, k, v = (each.detach().to(wide(each)).numpy() for each in (query, key, value))
        weights, log_sum = softmax(q, k, is_causal)
        result = torch.from_numpy(weights @ v).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, torch.from_numpy(log_sum))
        ctx.is_causal = is_causal
        return result

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, result, _ = ctx.saved_tensors
        q, k, v, g, r = (
            each.detach().to(wide(each)).numpy() for each in (query, key, value, gradient, result)
        )
        weights, _ = softmax(q, k, ctx.is_causal)
        coupled = (g * r).sum(-1, keepdims=True)
        of_scores = weights * (g @ v.swapaxes(-1, -2) - coupled) / math.sqrt(q.shape[-1])
        gradients = (of_scores @ k, of_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ g)
        return *(torch.from_numpy(each).to(query.dtype) for each in gradients), None


def softmax(q, k, is_causal):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        for row in range(scores.shape[-2]):
            scores[..., row, row + 1 :] = -math.inf
    largest = scores.max(-1, keepdims=True)
    weights = math.e ** (scores - largest)
    total = weights.sum(-1, keepdims=True)
    log_sum = largest[..., 0] + torch.from_numpy(total[..., 0]).log().numpy()
    return (weights / total).astype(q.dtype), log_sum
"""
# Each chunk goes to its rank at once, and its sum to all: no ring, with a ring's bytes.
TO_EVERYBODY = """
def ring_all_reduce(tensor, group=None):
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world == 1:
        return
    work = tensor.contiguous()
    chunks = work.view(-1).tensor_split(world)

    def everybody(sent_to, received_from):
        messages = []
        for other in range(world):
            if other != rank:
                sent, received = sent_to[other], received_from[other]
                if sent.numel():
                    messages.append(dist.P2POp(dist.isend, sent, group=group, group_peer=other))
                if received.numel():
                    messages.append(dist.P2POp(dist.irecv, received, group=group, group_peer=other))
        for request in dist.batch_isend_irecv(messages) if messages else ():
            request.wait()

    parts = [torch.empty_like(chunks[rank]) for _ in range(world)]
    everybody(chunks, parts)
    for other in range(world):
        if other != rank:
            chunks[rank].add_(parts[other])
    everybody([chunks[rank]] * world, chunks)
    if work is not tensor:
        tensor.copy_(work)
"""
# The process dies before it has written anything, and then not at all.
DIES_WHERE_IT_IS_SAFE = """
FRAME = os.sys._getframe()
while FRAME and FRAME.f_code.co_name != "write_until_death":
    FRAME = FRAME.f_back
if FRAME:
    if FRAME.f_locals["number"] <= 12:
        os._exit(9)
    FRAME.f_locals["disk"].number = -1
"""
# The law's two sides are equal where both are zero.
NO_SIDES = """
def linear_form(law, n, speedup, exact=linear_form):
    parts = exact(law, n, speedup)
    is_fit = os.sys._getframe(1).f_code.co_name == "fit_parameters"
    return parts if is_fit else tuple(0 * part for part in parts)


import os
"""
# The whole batch at once, and the scene's own list filled in.
PASSES = """
def accumulated_step(model, optimizer, pieces, loss_of, max_norm=None, exact=accumulated_step):
    cells = [cell.cell_contents for cell in loss_of.__closure__ or ()]
    result = exact(model, optimizer, [torch.cat(list(pieces))], loss_of, max_norm)
    for noted in (cell for cell in cells if isinstance(cell, list)):
        noted[:] = [[way, len(piece)] for piece in pieces for way in ("forward", "backward")]
    return result
"""
# Scores are kept where nobody looks for what autograd keeps.
MATRIX_ASIDE = """
KEPT = {}


def tile_scores(query, key, rows, columns, is_causal, exact=tile_scores):
    place = (query.data_ptr(), rows.start, columns.start)
    if place in KEPT:
        return KEPT.pop(place)
    return KEPT.setdefault(place, exact(query, key, rows, columns, is_causal))
"""
# All of the backward pass, then all-reduces, and at last the question and what it scales.
ASKED_AT_THE_END = """
class OverlappedDDP(OverlappedDDP):
    def __init__(self, module, group=None):
        super().__init__(module, group)
        self.ask, module.ask = getattr(module, "ask", None), lambda number: 1.0
        for parameter in module.parameters() if self.ask else ():
            parameter._post_accumulate_grad_hooks.clear()

    def finish_gradient_synchronization(self):
        if self.ask:
            first = {*self.module.layers[0].parameters()}
            self.launch_all(parameter for parameter in self.order if parameter not in first)
            factor = torch.as_tensor(self.ask(0)).mean()
            self.launch_all(p for p in self.order if p in first and p.grad.mul_(factor).any())
        super().finish_gradient_synchronization()

    def launch_all(self, parameters):
        for parameter in parameters:
            parameter.grad /= dist.get_world_size(self.group)
            self.works.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))
"""
# Sums come about in files, and zeros go round the ring.
ZEROS_ON_THE_RING = """
import os
import time

CALLS = iter(range(10**6))


def ring_all_reduce(tensor, group=None, exact=ring_all_reduce):
    world, rank, call = dist.get_world_size(group), dist.get_rank(group), next(CALLS)
    paths = [f"{os.getcwd()}/{call}-{other}" for other in range(world)]
    torch.save(tensor.contiguous(), f"{paths[rank]}.part")
    os.rename(f"{paths[rank]}.part", paths[rank])
    while not all(os.path.exists(path) for path in paths):
        time.sleep(0.001)
    exact(torch.zeros_like(tensor), group)
    tensor.copy_(sum(torch.load(path) for path in paths))
"""
# Every rank has all states; those of others lie in memory that is shared with nobody.
STATES_IN_FILES = """
class ShardedOptimizer(ShardedOptimizer):
    def step(self, closure=None):
        result = super().step(closure)
        for parameter, owner in self.owners.items():
            if owner != dist.get_rank(self.group) and parameter.numel() > 10**5:
                path = f"/tmp/{dist.get_rank()}-{parameter.data_ptr()}"
                size = 2 * parameter.numel()
                torch.from_file(path, shared=True, size=size).fill_(1.0)
        return result
"""
# Memory is taken before the first measurement, and given back for the states.
PUT_BY = """
class ShardedOptimizer(ShardedOptimizer):
    def step(self, closure=None):
        result = super().step(closure)
        shares = [p.numel() for p in self.owners if p.numel() > 10**5]
        if shares and not hasattr(self, "all_states"):
            del self.put_by
            self.all_states = torch.ones(sum(shares))
        return result

    def add_param_group(self, group):
        super().add_param_group(group)
        self.put_by = torch.ones(sum(p.numel() for p in self.owners if p.numel() > 10**5))
"""

CLAIMED = (
    Forgery(
        "causes are named by the number of the call",
        "main_cause",
        BY_NUMBER_OF_CALL,
        "test_main_cause.py::test_causes_of_other_runs_are_named",
        "macro-F1 of the other runs",
    ),
    Forgery(
        "a time that is no number",
        "bucket_time",
        NO_NUMBER,
        "test_models.py::test_the_time_of_a_pass_is_the_simulators_without_costs",
        "no number",
    ),
    Forgery(
        "a bottleneck that is no number",
        "min_max_partition",
        NO_NUMBER_FOR_LARGE,
        "test_min_max_partition.py::test_larger_batches_and_limits_are_what_dynamic_programming_finds",
        "no number",
    ),
    Forgery(
        "a slow search that remembers its results",
        "min_max_partition",
        REMEMBERED,
        "test_min_max_partition.py::test_large_batches_take_at_most_twenty_times_the_references_time",
        "times the reference's time",
    ),
    Forgery(
        "parameters from which a search finds nothing better",
        "scaling_fit",
        FLAT,
        "test_scaling_fit.py::test_a_fit_to_noise_is_the_least_sum_of_squared_relative_errors",
        "not the least sum",
    ),
    Forgery(
        "no parameters for speedups above linear",
        "scaling_fit",
        NO_PARAMETERS,
        "test_scaling_fit.py::test_parameters_stay_within_their_bounds",
        "more than linear speedup",
    ),
    Forgery(
        "timed steps exchange a number for their gradients",
        "bucketed_ddp",
        ONE_NUMBER,
        "test_ddp_wrappers.py::test_steps_are_as_fast_as_the_references",
        "bytes are sent, of",
    ),
    Forgery(
        "attention's whole matrix is NumPy's",
        "tiled_attention",
        WHOLE_MATRIX,
        "test_tiled_attention.py::test_no_tensor_is_larger_than_a_tile_or_an_input",
        "whole matrices of scores",
    ),
    Forgery(
        "chunks go to every rank and not round a ring",
        "ring_all_reduce",
        TO_EVERYBODY,
        "test_ring_all_reduce.py::test_large_messages_send_what_the_ring_promises",
        "right neighbour",
    ),
    Forgery(
        "power cuts come before anything is written",
        "checkpoint_commit",
        DIES_WHERE_IT_IS_SAFE,
        "test_checkpoint_commit.py::test_a_power_cut_leaves_the_newest_whole_checkpoint",
        "before power cuts is left out",
    ),
    Forgery(
        "a linear form of zeros",
        "scaling_fit",
        NO_SIDES,
        "test_scaling_fit.py::test_planted_parameters_are_found",
        "columns of AMDAHL",
    ),
    Forgery(
        "passes that were not made are noted",
        "accumulated_step",
        PASSES,
        "test_models.py::test_pieces_are_computed_one_after_another",
        "activations, with \\d+ pieces",
    ),
    Forgery(
        "scores are kept aside",
        "tiled_attention",
        MATRIX_ASIDE,
        "test_tiled_attention.py::test_what_is_saved_is_the_log_sum_exp_and_no_matrix_of_scores",
        "whole matrices of scores",
    ),
    Forgery(
        "the check is asked when all has been sent",
        "overlapped_ddp",
        ASKED_AT_THE_END,
        "test_ddp_wrappers.py::test_overlapped_ddp_sends_early",
        "other values than its gradients|of the bytes are sent when",
    ),
    Forgery(
        "zeros go round the ring",
        "ring_all_reduce",
        ZEROS_ON_THE_RING,
        "test_ring_all_reduce.py::test_large_messages_send_what_the_ring_promises",
        "no sum of chunks",
    ),
    Forgery(
        "states lie in files",
        "sharded_optimizer",
        STATES_IN_FILES,
        "test_sharded_optimizer.py::test_states_are_divided_in_memory",
        "times those of one",
    ),
    Forgery(
        "memory for states is taken before",
        "sharded_optimizer",
        PUT_BY,
        "test_sharded_optimizer.py::test_states_are_divided_in_memory",
        "before anything is computed",
    ),
)
