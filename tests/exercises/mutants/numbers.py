"""Mistakes in the exercises that one process can check."""

from __future__ import annotations

from mutants.mutant import mutants

NUMBERS = (
    *mutants(
        "main_cause",
        "test_main_cause.py::test_a_baseline_of_something_else_is_seen",
        ("the baseline is not compared", "if baseline is not None and (", "if False and ("),
        ("any baseline is of something else", "is not None and", "is not None or False and"),
        (
            "a column is added to the caller's table",
            "    shares = lost_shares(run)\n",
            '    run["steps"]["share"] = 0.0\n    shares = lost_shares(run)\n',
        ),
    ),
    *mutants(
        "main_cause",
        "test_main_cause.py::test_causes_of_the_public_runs_are_named",
        ("time that data take is overlooked", '-loading": above(0.1,', '-loading": above(10.0,'),
        ("exchanges are not counted", "if exchanges > 1.5:", "if exchanges > 1500:"),
        ("slow first steps do not count as a warm-up", ".mean() > 1.05 *", ".mean() > 1000 *"),
    ),
    *mutants(
        "step_memory",
        "test_one_device.py::test_states_are_four_numbers_a_parameter_with_adamw_and_two_with_sgd",
        ("SGD without momentum has states", '"sgd": 0', '"sgd": 1'),
        (
            "gradients and states change places",
            '        "gradients": FLOAT32 * parameters,\n'
            '        "optimizer states": FLOAT32 * parameters * states_each,',
            '        "gradients": FLOAT32 * parameters * states_each,\n'
            '        "optimizer states": FLOAT32 * parameters,',
        ),
    ),
    *mutants(
        "step_memory",
        "test_one_device.py::test_a_block_keeps_what_autograd_saves",
        ("one norm a block", "norms = 2 * norm_saves(tokens,", "norms = 1.5 * norm_saves(tokens,"),
        ("fused attention keeps the scores", "if not fused_attention:", "if fused_attention:"),
        ("the GELU keeps its input only", "8 * channels", "4 * channels"),
        ("autocast halves the norm's input", "FLOAT32 * tokens * (", "compute_bytes * tokens * ("),
        (
            "scores count as attention",
            '        "attention": 4 * channels,\n        "attention scores": scores,',
            '        "attention": 4 * channels + scores,\n        "attention scores": 0,',
        ),
        ("targets take four bytes", "INT64 * tokens", "FLOAT32 * tokens"),
    ),
    *mutants(
        "step_flops",
        "test_one_device.py::test_operations_are_those_that_torch_counts",
        ("the head is left out", "* 12 * width**2 + vocabulary * width", "* 12 * width**2"),
        (
            "a backward pass costs what a forward pass does",
            "3 * forward_flops",
            "2 * forward_flops",
        ),
        ("attention is halved for the mask", "2 * (2 * width * seq_len)", "(2 * width * seq_len)"),
    ),
    *mutants(
        "step_flops",
        "test_one_device.py::test_gpt2_and_published_runs",
        ("days of 24 minutes", "/ 86_400", "/ 1_440"),
        ("the share is in percent", "return tokens_per_s *", "return 100 * tokens_per_s *"),
    ),
    *mutants(
        "accumulated_step",
        "test_models.py::test_any_split_of_a_batch_makes_the_update_of_the_whole",
        (
            "a frozen weight's gradient of before counts",
            "    optimizer.zero_grad(set_to_none=True)\n    total,",
            "    for p in model.parameters():\n"
            "        p.grad = None if p.requires_grad else p.grad\n    total,",
        ),
        ("pieces count alike", "(len(piece) / total)", "(1 / len(pieces))"),
        (
            "gradients of somebody else count",
            "    optimizer.zero_grad(set_to_none=True)\n    total",
            "    total",
        ),
        (
            "each gradient is bounded by itself",
            "gradient *= max_norm / norm",
            "gradient *= min(1.0, max_norm / float(gradient.norm()))",
        ),
        (
            "gradients are left",
            "    optimizer.step()\n    optimizer.zero_grad(set_to_none=True)\n",
            "    optimizer.step()\n",
        ),
        ("small gradients are enlarged to the bound", "not None and norm > max_norm", "not None"),
        (
            "what no loss depends on gets zeros",
            "    gradients = [p.grad for p in model.parameters() if p.grad is not None]",
            "    for p in model.parameters():\n"
            "        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
            "    gradients = [p.grad for p in model.parameters()]",
        ),
        ("the norm is a tensor", "return mean, norm.item()", "return mean, norm"),
    ),
    *mutants(
        "accumulated_step",
        "test_models.py::test_pieces_are_computed_one_after_another",
        (
            "all pieces are computed at once",
            "    for piece in pieces:\n"
            "        share = loss_of(model, piece) * (len(piece) / total)\n"
            "        share.backward()\n        mean += share.item()\n",
            "    share = loss_of(model, torch.cat(list(pieces)))\n    share.backward()\n"
            "    mean += share.item()\n",
        ),
        (
            "one backward pass for all pieces",
            "        share.backward()\n        mean += share.item()\n",
            "        mean = mean + share\n    mean.backward()\n    mean = mean.item()\n",
        ),
    ),
    *mutants(
        "tiled_attention",
        "test_tiled_attention.py::test_queries_and_keys_may_differ_in_number",
        ("sums are not shrunk as the maximum grows", "total = total * shrink +", "total = total +"),
        (
            "the last query sees the last key",
            "(column > row[:, None])",
            "(column > row[:, None] + key.shape[-2] - query.shape[-2])",
        ),
    ),
    *mutants(
        "tiled_attention",
        "test_tiled_attention.py::test_what_is_saved_is_the_log_sum_exp_and_no_matrix_of_scores",
        ("the log-sum-exp lacks the maximum", "largest + total.log()", "total.log()"),
        (
            "scores are kept beside what is saved",
            "        ctx.is_causal = is_causal\n",
            "        ctx.is_causal, ctx.scores = is_causal, query @ key.mT\n",
        ),
    ),
    *mutants(
        "tiled_attention",
        "test_tiled_attention.py::test_tiles_of_any_size_give_the_same",
        (
            "the softmax's coupling is left out",
            "(of_weights - coupled[..., rows, :])",
            "of_weights",
        ),
    ),
    *mutants(
        "tiled_attention",
        "test_tiled_attention.py::test_no_tensor_is_larger_than_a_tile_or_an_input",
        (
            "one tile holds everything",
            "    return [slice(start, min(start + TILE, count)) for start in range(0, count, "
            "TILE)]",
            "    return [slice(0, count)]",
        ),
    ),
    *mutants(
        "tiled_attention",
        "test_tiled_attention.py::test_inputs_of_any_number_of_dimensions_and_size_are_taken",
        ("no maximum is subtracted", ".maximum(largest, scores.amax(-1))", ".zeros_like(largest)"),
        ("inputs have four dimensions", ", :].to(dtype).mT", ", :].to(dtype).transpose(2, 3)"),
    ),
    *mutants(
        "tiled_attention",
        "test_tiled_attention.py::test_sums_of_16_bit_inputs_are_kept_in_float32",
        ("gradients are summed in 16 bits", ".zeros_like(each, dtype=wider)", ".zeros_like(each)"),
    ),
    *mutants(
        "bucket_assignment",
        "test_models.py::test_buckets_are_those_of_torch",
        ("a bucket closes before it is full", "if total >= caps[min", "if total > caps[min"),
        ("the first cap counts for all", "closed = [], 0, closed + 1", "closed = [], 0, closed"),
        ("kinds share a bucket", "open_buckets.get(kind, ([], 0,", "open_buckets.get(0, ([], 0,"),
        ("buckets left open come in the order of their kinds", "left_open[::-1]", "left_open"),
        ("the second cap counts for all that follow", "closed, len(caps)", "closed, 1, len(caps)"),
    ),
    *mutants(
        "bucket_assignment",
        "test_models.py::test_no_gradients_make_no_buckets_and_sizes_stay",
        ("no gradients make a bucket", "if members:", "if members or not buckets:"),
    ),
    *mutants(
        "bucket_time",
        "test_models.py::test_the_time_of_a_pass_is_the_simulators_without_costs",
        ("all-reduces do not wait for each other", "end = max(end, ready) +", "end = ready +"),
        ("a bucket is ready with its first gradient", "max(ready_s[index]", "min(ready_s[index]"),
        (
            "a bucket is ready with the gradient that joined it last",
            "[max(ready_s[index] for index in bucket) for bucket in buckets]",
            "[ready_s[bucket[-1]] for bucket in buckets]",
        ),
        (
            "all-reduces wait for the computation",
            "    end = ready = 0.0",
            "    ready = 0.0\n    end = max(ready_s)",
        ),
        (
            "buckets are reduced in the order of their indices",
            "    bucket_bytes = [",
            "    buckets = sorted(buckets)\n"
            "    bucket_ready_s = [max(ready_s[index] for index in bucket) for bucket in buckets]\n"
            "    bucket_bytes = [",
        ),
        ("the last all-reduce ends the pass", "max(max(ready_s), *ends_s)", "ends_s[-1]"),
    ),
    *mutants(
        "bucket_time",
        "test_models.py::test_gradients_of_a_pass_stay",
        (
            "the caller's buckets are sorted",
            "    bucket_bytes = [",
            "    for bucket in buckets:\n        bucket.sort()\n    bucket_bytes = [",
        ),
    ),
    *mutants(
        "bucket_time",
        "test_models.py::test_all_reduces_end_one_after_another",
        (
            "the first all-reduce begins at once",
            "        ready = max(ready, moment)\n",
            "        ready = max(ready, moment) if ends else 0.0\n",
        ),
    ),
    *mutants(
        "cap_search",
        "test_models.py::test_no_cap_is_faster_than_the_one_that_is_found",
        ("of equals the smallest cap", "time_s <= best[1]", "time_s < best[1]"),
        ("caps are skipped", "        cap = high + 1\n", "        cap = 2 * high + 1\n"),
        ("caps beyond all gradients", "        high = min(high, total)\n", ""),
    ),
    *mutants(
        "cap_search",
        "test_models.py::test_gigabytes_take_as_few_tries_as_bytes",
        (
            "caps are tried byte by byte",
            "        low, high = cap_interval(sizes_bytes, buckets)\n"
            "        high = min(high, total)\n",
            "        low = high = cap\n"
            "        while high < total and assign_buckets(sizes_bytes, high + 1) == buckets:\n"
            "            high += 1\n",
        ),
    ),
    *mutants(
        "cap_search",
        "test_models.py::test_every_bucketing_is_walked_once_with_its_caps",
        (
            "one list for all bucketings",
            "    total, cap = sum(sizes_bytes), 1\n    while cap <= total:\n"
            "        buckets = assign_buckets(sizes_bytes, cap)\n",
            "    total, cap, buckets = sum(sizes_bytes), 1, []\n    while cap <= total:\n"
            "        buckets[:] = assign_buckets(sizes_bytes, cap)\n",
        ),
    ),
    *mutants(
        "min_max_partition",
        "test_min_max_partition.py::test_no_partition_of_any_kind_is_better",
        ("a rank without a sample", "return best, one_each(plan, world_size)", "return best, plan"),
        ("ranks get equal numbers of samples", "smallest_bottleneck(low, high, attempt)", "high"),
        ("the lower bound is too high", "return cost(more + 1,", "return cost(more + 2,"),
        (
            "the lower bound is the longest text alone",
            "    return cost(more + 1, batch.lengths[more * (world_size - 1)]).max().item()",
            "    return cost(more[:1] + 1, batch.lengths[:1]).max().item()",
        ),
    ),
    *mutants(
        "min_max_partition",
        ""
        "test_min_max_partition.py::test_larger_batches_and_limits_are_what_dynamic_programming_finds",
        (
            "groups of large batches are of equal size",
            "    return best, one_each(plan, world_size)\n",
            "    if count > 10:\n"
            "        plan[:] = np.linspace(0, count, world_size + 1).astype(int).tolist()\n"
            "    return best, one_each(plan, world_size)\n",
        ),
        ("the limit does not hold", "(longest), limit, np.int64", "(longest), 10**6, np.int64"),
    ),
    *mutants(
        "min_max_partition",
        "test_min_max_partition.py::test_most_samples_is_what_counting_finds",
        ("a sample too few fits", "cost(middle, longest) <= time", "cost(middle, longest) < time"),
        ("a cost that knows is searched for", 'hasattr(cost, "most")', 'hasattr(cost, "largest")'),
        (
            "of a cost that knows the limit does not hold",
            "return np.minimum(cost.most(longest, time), limit)",
            "return cost.most(longest, time)",
        ),
    ),
    *mutants(
        "min_max_partition",
        ""
        "test_min_max_partition.py::test_large_batches_take_at_most_twenty_times_the_references_time",
        ("batch sizes are tried one by one", "(low + high + 1) // 2", "np.minimum(low + 1, high)"),
    ),
    *mutants(
        "min_max_partition",
        "test_min_max_partition.py::test_the_search_ends_at_the_smallest_bottleneck",
        ("the search ends where bounds are less than one apart", "low < high:", "high - low >= 1:"),
        ("a trial is believed whatever it says", "if fits == (found > trial):\n", "if False:\n"),
    ),
    *mutants(
        "min_max_partition",
        "test_min_max_partition.py::test_ranks_that_are_left_over_get_a_text_and_none_costs_more",
        ("the last rank's text is forgotten", "- world_size + 1, count + 1", "- world_size, count"),
    ),
    *mutants(
        "loss_scale",
        "test_models.py::test_scaled_means_of_samples_have_the_gradient_of_the_whole_batch",
        ("DDP's mean is forgotten", "world_size * local / total", "local / total"),
        ("ranks count alike", "world_size * local / total", "1.0"),
        ("upside down", "world_size * local / total", "total / (world_size * local)"),
        ("there are three ranks", "world_size * local / total", "3 * local / total"),
    ),
    *mutants(
        "cost_fit",
        "test_models.py::test_a_planted_cost_is_found_and_noise_makes_none_negative",
        (
            "a coefficient may be negative",
            "solution, _ = nnls(terms / scale / time_s[:, None], np.ones_like(time_s))",
            "solution = np.linalg.lstsq(terms / scale / time_s[:, None], np.ones_like(time_s))[0]",
        ),
        ("errors are absolute", "scale / time_s[:, None], np.ones_like(time_s)", "scale, time_s"),
        (
            "negative coefficients are cut off",
            "solution, _ = nnls(terms / scale / time_s[:, None], np.ones_like(time_s))",
            "rows = terms / scale / time_s[:, None]\n"
            "    solution = np.maximum(np.linalg.lstsq(rows, np.ones_like(time_s))[0], 0)",
        ),
        ("scales are not undone", "(solution / scale).tolist()", "solution.tolist()"),
        ("lengths are not squared", "batch_size * longest**2", "batch_size**2 * longest"),
        (
            "small coefficients count as none",
            "(solution / scale).tolist()",
            "np.where(solution / scale < 1e-9, 0.0, solution / scale).tolist()",
        ),
        (
            "the caller's lengths become tokens",
            "    terms = np.stack([np.ones_like(time_s), batch_size * longest, batch_size * "
            "longest**2], axis=1)",
            "    longest *= batch_size\n"
            "    terms = np.stack([np.ones_like(time_s), longest, longest**2 / batch_size], "
            "axis=1)",
        ),
    ),
    *mutants(
        "comparable_runs",
        "test_comparable_runs.py::test_pairs_are_judged_alike_in_either_order",
        (
            "an unknown device is another",
            "None not in (one.device, other.device) and one.device",
            "one.device",
        ),
        ("an emulated network may have another name", "one.is_emulated or", "one.is_emulated and"),
        ("any two networks go together", "and one.world_size != other.world_size else", "else"),
        (
            "what exchanged nothing needs the same network",
            "not (one.exchanged and other.exchanged) or one.network",
            "one.network",
        ),
        (
            "a backend that is not recorded is any",
            "    alike = (one.backend, one.ranks_per_gpu) == (other.backend, other.ranks_per_gpu)",
            "    backend = other.backend if one.backend is None else one.backend\n"
            "    alike = (backend, one.ranks_per_gpu) == (other.backend or backend, "
            "other.ranks_per_gpu)",
        ),
    ),
    *mutants(
        "comparable_runs",
        "test_comparable_runs.py::test_the_first_setting_that_differs_is_named",
        (
            "a missing setting never differs",
            " and not (unknown_agrees and None in values)",
            " and None not in values",
        ),
        ("a setting of zero is unknown", "and None in values", "and not all(values)"),
    ),
    *mutants(
        "step_apart",
        "test_models.py::test_every_moment_of_a_step_is_one_of_its_parts",
        ("overlap counts as exposed", "length(communicating) - overlap", "length(communicating)"),
        (
            "intervals beyond the step count",
            "computing = intersection(union(computation), whole)",
            "computing = union(computation)",
        ),
        ("overlapping intervals count twice", "[1:, 0] > reached[:-1]", "[1:, 0] > pairs[:-1, 1]"),
        ("every step begins at zero", "whole = union([window])", "whole = union([(0, window[1])])"),
    ),
    *mutants(
        "step_apart",
        "test_models.py::test_intervals_are_joined_cut_and_taken_away",
        ("nothing is taken away", "    return intersection(left, edges)", "    return left"),
        ("intervals that touch are not joined", "1:, 0] > reached[:-1", "1:, 0] >= reached[:-1"),
    ),
    *mutants(
        "step_apart",
        "test_models.py::test_many_thousands_of_intervals_are_taken_apart",
        (
            "the caller's intervals are sorted",
            "    pairs = pairs[pairs[:, 1] > pairs[:, 0]]\n    if",
            "    pairs = np.asarray(intervals, dtype=float).reshape(-1, 2)\n"
            "    pairs[:] = pairs[np.argsort(pairs[:, 0])]\n"
            "    pairs = pairs[pairs[:, 1] > pairs[:, 0]]\n    if",
        ),
        (
            "every two intervals are compared",
            '    first = np.searchsorted(right[:, 1], left[:, 0], "right")\n',
            "    return union([(max(a, c), min(b, d)) for a, b in left for c, d in right])\n"
            "    first = 0\n",
        ),
    ),
    *mutants(
        "scaling_fit",
        "test_scaling_fit.py::test_what_cannot_be_fitted_is_refused",
        ("too few points are fitted", "MORE_POINTS = 2", "MORE_POINTS = 0"),
        ("one rank counts as a point", "np.unique(ranks[ranks > 1])", "np.unique(ranks)"),
        ("an infinite speedup is fitted", "np.isfinite(speedup).all() and (speedup", "(speedup"),
    ),
    *mutants(
        "scaling_fit",
        "test_scaling_fit.py::test_planted_parameters_are_found",
        ("pairs are counted once", "[n - 1, n * (n - 1)], axis", "[n - 1, n * (n - 1) / 2], axis"),
    ),
    *mutants(
        "scaling_fit",
        "test_scaling_fit.py::test_parameters_stay_within_their_bounds",
        (
            "parameters may be negative",
            "np.minimum(nnls(rows, target)[0], law.largest)",
            "np.linalg.lstsq(rows, target)[0]",
        ),
        ("one law's bound is forgotten", "law.largest", "law.largest if law is AMDAHL else np.inf"),
    ),
    *mutants(
        "scaling_fit",
        "test_scaling_fit.py::test_points_with_smaller_errors_count_more",
        ("errors of the points are ignored", "(at if errors is None else errors)", "at"),
        (
            "errors of speedups are taken for those of the left side",
            "(slope * (at if errors is None else errors))",
            "(slope * at if errors is None else errors)",
        ),
    ),
    *mutants(
        "checkpoint_commit",
        "test_checkpoint_commit.py::test_damage_is_found_in_files_of_the_same_size",
        ("checksums are not compared", "    if found != (size, crc):\n", "    if False:\n"),
        (
            "it gives up at the first damaged one",
            "        except Damaged:\n            continue\n",
            "        except Damaged:\n            return None\n",
        ),
    ),
    *mutants(
        "checkpoint_commit",
        "test_checkpoint_commit.py::test_a_power_cut_leaves_the_newest_whole_checkpoint",
        ("the manifest is not flushed", "    flush(partial / MANIFEST)\n", ""),
        (
            "a checkpoint is deleted under its name",
            "    path.rename(old)\n"
            "    flush(path.parent)  # or files might be gone before the name is\n"
            "    shutil.rmtree(old, ignore_errors=True)\n    # END",
            "    shutil.rmtree(path, ignore_errors=True)\n    # END",
        ),
        (
            "a checkpoint is deleted in another folder, and its old one is not flushed",
            "    path.rename(old)\n"
            "    flush(path.parent)  # or files might be gone before the name is\n",
            '    old = path.parent / "removed" / path.name\n'
            "    old.parent.mkdir(exist_ok=True)\n"
            "    path.rename(old)\n",
        ),
        ("the last rename is not flushed", "    flush(final.parent)\n", ""),
        (
            "files go before their folder's name has",
            "    flush(path.parent)  # or files might be gone before the name is\n",
            "",
        ),
    ),
    *mutants(
        "checkpoint_commit",
        "test_checkpoint_commit.py::test_others_see_only_whole_checkpoints",
        (
            "the manifest is written under the final name",
            '    (partial / MANIFEST).write_text(json.dumps({"crc": '
            'zlib.crc32(text.encode()), "content": text}))\n'
            "    flush(partial / MANIFEST)\n    flush(partial)\n"
            '    final = partial.with_name(f"{FINISHED}{partial.name[len(PARTIAL) :]}")\n'
            "    if final.exists():\n        remove_checkpoint(final)\n    partial.rename(final)\n",
            '    final = partial.with_name(f"{FINISHED}{partial.name[len(PARTIAL) :]}")\n'
            "    if final.exists():\n        remove_checkpoint(final)\n    partial.rename(final)\n"
            '    (final / MANIFEST).write_text(json.dumps({"crc": zlib.crc32(text.encode()), '
            '"content": text}))\n'
            "    flush(final / MANIFEST)\n    flush(final)\n",
        ),
    ),
    *mutants(
        "checkpoint_commit",
        "test_checkpoint_commit.py::test_what_a_run_says_of_itself_comes_back",
        ("facts are not given back", 'return content["facts"], files', "return {}, files"),
    ),
    *mutants(
        "checkpoint_commit",
        "test_checkpoint_commit.py::test_ranks_read_their_part_of_the_files",
        ("rank 0 reads everything", "(files)[rank::ranks]:", "(files) if rank == 0 else ():"),
        (
            "files that do not divide are nobody's",
            "sorted(files)[rank::ranks]",
            "sorted(files)[rank : len(files) // ranks * ranks : ranks]",
        ),
    ),
    *mutants(
        "checkpoint_commit",
        "test_checkpoint_commit.py::test_damage_is_found_and_the_one_before_is_taken",
        ("a manifest that is no UTF-8 is not expected", ", ValueError,", ", json.JSONDecodeError,"),
    ),
    *mutants(
        "checkpoint_commit",
        "test_checkpoint_commit.py::test_nothing_is_found_where_nothing_is",
        (
            "a folder without checkpoints is an error",
            "    for path in finished_checkpoints(folder):\n",
            "    for path in finished_checkpoints(folder) or sorted(folder.iterdir())[:1]:\n",
        ),
    ),
)
