"""Bugs in training: a run's check of its own step, checkpoints, the order of data, generated optimizers."""

from __future__ import annotations

from aottrain.compiler.optimizers import formulas, plan, step
from aottrain.data import ahead, arrays, batches, image_folder, images, order
from aottrain.data.tokens import documents, packing, token_files, tokenizer, windows
from aottrain.metrics import guest
from aottrain.tasks.building import writing
from aottrain.toolchain import ending
from aottrain.trainer import checkpoint, console
from aottrain.trainer.reliability import identity, streams
from aottrain.trainer.verify import rounding, updates, verification
from aottrain.trainer.weights import float8, groups
from recipes import _hf_packing, hf
from tests.planted_bugs.planting import Area, TestsOf

VERIFYING = Area("verification")
RUNS = TestsOf("tests/trainer/test_verification.py")
VERIFYING.edit(
    "an infinite difference is as good as none",
    RUNS.distances_and_norms,
    rounding.distance,
    'torch.where(same, 0.0, difference.nan_to_num(float("inf")))',
    "difference.nan_to_num(0.0, 0.0)",
    quick=True,
)
VERIFYING.edit(
    "a difference from nothing but zeros is small",
    RUNS.distances_and_norms,
    rounding.relative_norm,
    'norm / reference if reference else float("inf")',
    "norm / reference if reference else 1.0",
)
VERIFYING.edit(
    "elements that are small beside the largest do not count",
    RUNS.elements_that_are_small_beside_the_largest_count,
    verification.compare,
    "if not errors[what] <= tolerance or not explained_by_sums(distances[what], value, tolerance)",
    "if not errors[what] <= tolerance",
    quick=True,
)
VERIFYING.edit(
    "no element may be as far off as eager's own",
    RUNS.a_few_signs_that_rounding_turns_excuse_as_many_and_no_more,
    rounding.unexplained,
    "allowed = allowed.maximum(",
    "allowed = allowed.minimum(",
)
VERIFYING.edit(
    "a gradient that is missing is not missed",
    RUNS.a_wrong_step_is_named,
    verification._check_presence,
    "if (actual is None) != (expected is None):",
    "if actual is None and expected is None:",
)
VERIFYING.edit(
    "buffers are not compared",
    RUNS.a_wrong_step_is_named,
    verification._outcome,
    "for name, buffer in module.named_buffers()",
    "for name, buffer in ()",
)
VERIFYING.edit(
    "a wrong loss is let through",
    RUNS.a_wrong_step_is_named,
    verification.compare,
    "if not loss_error <= config.loss_tolerance + FACTOR * loss_noise:",
    "if loss_error < 0:",
)
VERIFYING.edit(
    "gradients beyond the tolerance are let through",
    RUNS.a_wrong_step_is_named,
    verification.compare,
    "for what in beyond:",
    "for what in ():",
    quick=True,
)
VERIFYING.edit(
    "the step is compared with itself",
    (RUNS.a_wrong_step_is_named, RUNS.other_random_numbers_are_a_difference),
    verification.compare,
    "eager = reference.run(reference.micro_batches)",
    "eager = compiled",
)
VERIFYING.edit(
    "the guilty micro-batch is another one",
    RUNS.all_micro_batches_and_their_sum_are_compared,
    verification._guilty,
    "return i + 1",
    "return i",
)
VERIFYING.edit(
    "parameters stay changed after the noise is measured",
    RUNS.what_rounding_explains_is_not_an_error,
    verification._changed_parameters,
    "finally:\n        with torch.no_grad():\n            for parameter, value in zip(parameters, kept, strict=True):",
    "finally:\n        with torch.no_grad():\n            for parameter, value in ():",
    quick=True,
)
VERIFYING.edit(
    "eager's noise excuses anything",
    RUNS.what_rounding_explains_is_not_an_error,
    verification._rounding_unit,
    "return 2.0**-20",
    "return 2.0**-2",
)

UPDATES = TestsOf("tests/trainer/test_updates.py")
VERIFYING.edit(
    "a wrong update is let through",
    UPDATES.a_wrong_update_is_named,
    updates._compare,
    "if beyond[inside].any():",
    "if beyond[inside].all() and not beyond[inside].any():",
)
VERIFYING.edit(
    "counts of steps are not compared",
    UPDATES.a_wrong_update_is_named,
    updates.verify_update,
    "_check_count(step_number, name, old, new, taken)",
    "taken = bool(taken)",
)

CHECKPOINTS = Area("checkpoints")
FILES = TestsOf("tests/trainer/test_checkpoint.py")
CHECKPOINTS.edit(
    "a random stream that starts anew", FILES.every_random_stream_goes_on, streams.set_random_state,
    '    torch.set_rng_state(state["torch"])\n', "", quick=True,
)  # fmt: skip
CHECKPOINTS.edit(
    "Python's own stream starts anew",
    FILES.every_random_stream_goes_on,
    streams.set_random_state,
    "random.setstate((version, tuple(internal), gauss))",
    "random.seed(0)",
)
CHECKPOINTS.edit(
    "checksums are not compared",
    FILES.a_damaged_one_is_passed_over_and_named,
    checkpoint._check_sums,
    "if digest != _digest(path):",
    "if not _digest(path):",
)
CHECKPOINTS.edit(
    "the checksum of the weights is not compared",
    "tests/trainer/weights/test_files.py::test_weights_of_another_checkpoint_are_never_loaded",
    checkpoint._with_weights,
    "if _digest(weights) != sha256:",
    "if not _digest(weights):",
)
CHECKPOINTS.edit(
    "a checkpoint of that step is written over before the new one is whole",
    "tests/trainer/weights/test_files.py::test_a_save_that_ends_between_its_files_leaves_the_one_of_its_own_step",
    checkpoint.CheckpointFolder._write_weights,
    "while path.exists() and",
    "while not path.exists() and",
)
CHECKPOINTS.edit(
    "the oldest is taken for the newest",
    FILES.the_newest_is_found_and_old_ones_go,
    checkpoint.CheckpointFolder._entries,
    "key=lambda entry: entry.step, reverse=True",
    "key=lambda entry: entry.step, reverse=False",
    quick=True,
)
CHECKPOINTS.edit(
    "every checkpoint is kept",
    FILES.the_newest_is_found_and_old_ones_go,
    checkpoint.CheckpointFolder._remove_all_but,
    "path.unlink(missing_ok=True)",
    "pass",
)
CHECKPOINTS.edit(
    "later checkpoints of an earlier run count",
    FILES.a_new_run_in_an_old_folder_is_the_one_that_counts,
    checkpoint.CheckpointFolder.save,
    "if entry.step < step]",
    "if entry.step != step]",
)
CHECKPOINTS.edit(
    "another format is read all the same",
    FILES.another_programs_file_is_refused,
    checkpoint.load,
    "numbers[0] in (1, FORMAT, IN_PIECES)",
    "numbers[0] != FORMAT + 2",
)
CHECKPOINTS.edit(
    "settings that differ are not looked at",
    "tests/trainer/test_run.py::test_resuming_another_run_lists_every_difference",
    identity.check_identity,
    "if before.get(key) != current.get(key)",
    "if key == ''",
)

DATA = Area("data")
TEXT = TestsOf("tests/data/test_text_data.py")
DATA.edit(
    "every step sees the same batch",
    TEXT.neighbouring_seeds_and_steps_draw_unlike,
    order.step_generator,
    "step * 0xD1B54A32D192ED03",
    "step * 0",
    quick=True,
)
DATA.edit(
    "seeds do not matter",
    TEXT.neighbouring_seeds_and_steps_draw_unlike,
    order.step_generator,
    "seed * 0x9E3779B97F4A7C15",
    "seed * 0",
)
DATA.edit(
    "data drawn from torch's generator",
    (TEXT.drawing_data_leaves_torchs_generator_alone, TEXT.a_step_sees_the_same_whenever_it_is_asked_for),
    batches.SourceBatches._numbers,
    ", generator=step_generator(self.seed, step))",
    ")",
)
DATA.edit(
    "the last positions are never drawn",
    TEXT.every_position_can_be_drawn,
    batches.SourceBatches._numbers,
    "size = len(self.source.train)",
    "size = len(self.source.train) - 1",
)
DATA.edit(
    "held-out batches from what is trained on",
    TEXT.held_out_batches_are_fixed_and_never_trained_on,
    batches.SourceBatches.held_out,
    "self.source.held_out.read(row, None)",
    "self.source.train.read(row, None)",
    quick=True,
)
DATA.edit(
    "targets are the inputs",
    TEXT.targets_are_the_next_bytes,
    windows.cut,
    "windows[:, 1:]",
    "windows[:, :-1]",
    quick=True,
)
DATA.edit(
    "held-out batches are those of step 0",
    TEXT.a_recipe_can_make_its_own_batches,
    batches.MadeBatches.held_out,
    "step_generator(self.seed, _HELD_OUT_STREAM)",
    "step_generator(self.seed, 0)",
)

SOURCES, ORDER = TestsOf("tests/data/test_sources.py"), TestsOf("tests/data/test_order.py")
DATA.edit(
    "every epoch in the same order",
    ORDER.epochs_and_seeds_are_shuffled_unlike,
    order.in_epochs,
    "keys_of(seed, epochs)",
    "keys_of(seed, epochs * 0)",
)
DATA.edit(
    "numbers beyond the last example",
    f"{ORDER.a_permutation_has_each_number_once}[17]",
    order.permuted,
    "values >= np.uint64(size)",
    "values > np.uint64(size)",
)
DATA.edit(
    "windows of the second file are read from the first",
    SOURCES.windows_of_an_epoch_lie_side_by_side,
    windows.Windows.read,
    "self.parts[part]",
    "self.parts[0]",
)
DATA.edit(
    "what was read of a corpus stays resident",
    SOURCES.a_corpus_of_2_gb_is_not_resident,
    windows._let_go,
    "mapping is not None and",
    "mapping is None and",
)
DATA.edit(
    "an image is moved as its neighbour in the batch",
    SOURCES.an_image_is_moved_and_turned_by_its_own_key,
    images._drawn,
    "mixed(keys ^ np.uint64(which))",
    "mixed(keys[-1:] ^ np.uint64(which)).repeat(len(keys))",
)
DATA.edit(
    "read ahead: the step after the right one",
    f"{SOURCES.a_run_that_goes_on_anywhere_sees_the_same}[read_in_threads-epochs]",
    ahead.ReadAhead.at,
    "partial(self.on_cpu, number)",
    "partial(self.on_cpu, number + 1)",
)
DATA.edit(
    "a file that has changed is not looked at again",
    SOURCES.nanogpt_s_files_are_mapped_and_read_through_once,
    token_files._inspected,
    "{status.st_mtime_ns}",
    "",
)
DATA.edit(
    "the position of a token counts from its piece",
    SOURCES.a_file_larger_than_a_piece_is_inspected_whole,
    token_files.inspect,
    "position + int(values.argmax())",
    "int(values.argmax())",
)
DATA.edit(
    "pieces of text are lost",
    SOURCES.byte_pairs_are_learned_once_and_give_the_text_back,
    tokenizer.encoded,
    "np.concatenate(arrays)",
    "arrays[0][1:]",
)

PACKED = TestsOf("tests/data/test_packing.py")
ROWS, LOSS = (
    PACKED.every_target_is_there_once_and_rows_are_full,
    PACKED.the_loss_is_that_of_the_documents_alone_and_compiled_as_by_eager,
)
DATA.edit("each piece has a row of its own", ROWS, packing.packed, "above = rooms >> piece[1]", "above = 0")
DATA.edit("a document sees the one before", LOSS, packing.Packed.read, "place:end] = place\n", "place:end] = 0\n")

HF_PACKED = TestsOf("tests/recipes/test_hf_packing.py")
HF_LOSS = HF_PACKED.a_packed_loss_is_that_of_the_documents_alone_and_compiled_as_by_eager
DATA.edit(
    "positions of packed rows do not begin anew",
    f"{HF_LOSS}[mask]",
    _hf_packing.told,
    " - starts",
    " - 0 * starts",
)
DATA.edit(
    "a model that mixes documents is told of them in the way of another",
    HF_PACKED.a_large_model_is_tried_by_a_small_one_of_its_type,
    _hf_packing._keeps_apart,
    "<= TOLERANCE",
    "<= 1e3",
)
DATA.edit(
    "a place behind packed documents has a label",
    f"{HF_LOSS}[positions]",
    hf.prepare,
    "batch[1] == data.IGNORED, data.IGNORED",
    "batch[1] == data.IGNORED, 0",
)
DATA.edit(
    "labels are smoothed in evaluation, too",
    HF_PACKED.labels_are_smoothed_in_training_alone,
    hf.loss,
    "model.label_smoothing if model.training else 0.0",
    "model.label_smoothing",
)

STRANGE = TestsOf("tests/data/test_strange_data.py")
DATA.edit(
    "a number beyond float32 becomes infinite",
    STRANGE.a_target_beyond_float32,
    arrays.load_arrays,
    "np.isfinite(as_float32(values))",
    "np.isfinite(values)",
)
DATA.edit(
    "what is brighter than 255 of 65535 is white",
    STRANGE.pictures_of_16_bits_keep_their_shades,
    image_folder.decoded,
    'picture.mode.startswith("I")',
    "False",
)
DATA.edit(
    "a folder that may not be read is passed over",
    STRANGE.no_folder_is_left_out_because_it_may_not_be_read,
    documents.files_below,
    "os.walk(root, onerror=refuse)",
    "os.walk(root)",
)

OPTIMIZERS = Area("optimizers")
STEPS = TestsOf("tests/compiler/optimizers/test_optimizers.py")
COPIES = TestsOf("tests/compiler/optimizers/test_masters.py")
ERRORS = STEPS.the_error_is_no_larger_than_torchs
OPTIMIZERS.edit(
    "AdamW without the correction of its first mean",
    f"{ERRORS}[adamw-torch.float32-]",
    formulas._prepare_adamw,
    'b.compute("div", v["lr"], corrected[0])',
    'v["lr"]',
)
OPTIMIZERS.edit(
    "AdamW's square of the old mean",
    f"{ERRORS}[adamw-torch.float32-]",
    formulas._update_adamw,
    'b.compute("mul", gradient, gradient)',
    'b.compute("mul", gradient, mean)',
)
OPTIMIZERS.edit(
    "AdamW's decay is not decoupled from the sign",
    f"{ERRORS}[adamw-torch.float32-]",
    formulas._prepare_adamw,
    '"decay": b.compute("sub", one,',
    '"decay": b.compute("add", one,',
)
OPTIMIZERS.edit(
    "Lion steps by the mean, not by its sign",
    f"{ERRORS}[lion-torch.float32-]",
    formulas._update_lion,
    'b.compute("sign", mixed("beta1", "weight1"))',
    'mixed("beta1", "weight1")',
)
OPTIMIZERS.edit(
    "Nesterov's step is the plain one",
    f"{ERRORS}[sgd nesterov-torch.float32-]",
    formulas._update_sgd,
    'b.test("ne", v["nesterov"], zero), ahead, momentum',
    'b.test("ne", v["nesterov"], zero), momentum, momentum',
)
OPTIMIZERS.edit(
    "the first momentum is dampened",
    f"{ERRORS}[sgd dampening-torch.float32-]",
    formulas._prepare_sgd,
    'b.compute("where", first, one, b.compute("sub", one, v["dampening"]))',
    'b.compute("sub", one, v["dampening"])',
)
OPTIMIZERS.edit(
    "clipped up to the norm, not only down",
    f"{STEPS.clipping_is_torchs}[given1-evaluate]",
    formulas._clipping,
    'b.compute("min", ratio, one)',
    "ratio",
    quick=True,
)
OPTIMIZERS.edit(
    "a norm that is not finite is not skipped",
    STEPS.a_step_is_left_out_where_it_is_told_to,
    formulas._clipping,
    'skip = b.test("or", skips,',
    'skip = b.test("and", skips,',
)
OPTIMIZERS.edit(
    "clipped gradients are not rounded to their type",
    STEPS.a_clipped_gradient_is_rounded_as_if_it_had_been_written,
    formulas._update,
    '"gradient": b.cast(b.cast(clipped, segment.dtype), kind)}',
    '"gradient": b.cast(clipped, kind)}',
)
OPTIMIZERS.edit(
    "a float32 copy begins from its rounding at each step",
    COPIES.copies_are_trained_as_float32_and_parameters_are_their_rounding,
    formulas._update,
    '"parameter": old[MASTER]}',
    '"parameter": old["parameter"]}',
)
OPTIMIZERS.edit(
    "loaded copies are as torch has rounded them",
    COPIES.copies_are_trained_as_float32_and_parameters_are_their_rounding,
    step.GeneratedStep.load_state_dict,
    "if self.master_weights:",
    "if False:",
)
OPTIMIZERS.edit(
    "autograd does not hear of the update",
    STEPS.autograd_hears_of_the_update,
    plan.Plan.finish,
    "zip(self.parameters, self._active, strict=True) if on",
    "zip(self.parameters, self._active, strict=True) if not on",
)
OPTIMIZERS.edit(
    "copies of parameters with gaps are not written back",
    f"{STEPS.layouts}[with gaps]",
    plan.Plan.finish,
    "parameter.copy_(copy)",
    "copy.copy_(parameter)",
)
OPTIMIZERS.edit(
    "each device has its own norm",
    STEPS.parameters_on_several_devices_have_one_norm,
    step.GeneratedStep._run_all,
    'plan.tables.tables["total"].copy_(total)',
    "pass",
)
OPTIMIZERS.edit(
    "vectors decay, too",
    "tests/trainer/test_optimisation.py::test_only_matrices_decay",
    groups.parameter_groups,
    "config.weight_decay if decays else 0.0",
    "config.weight_decay",
    quick=True,
)

FLOAT8 = TestsOf("tests/trainer/weights/test_float8.py")
OPTIMIZERS.edit(
    "a gradient in float8 is scaled for another type",
    FLOAT8.products_are_those_of_the_rounded_operands,
    float8._Product.backward,
    "small, scale = _rounded(gradient, BACKWARD)",
    "small, scale = _rounded(gradient, FORWARD)",
)
OPTIMIZERS.edit(
    "a tied weight is multiplied in float8",
    FLOAT8.a_weight_that_is_an_embedding_too_stays_as_it_is,
    float8.use_float8,
    "uses[id(layer.weight)] == 1",
    "uses[id(layer.weight)] >= 1",
)

SIGNALS = Area("signals and loggers")
ENDING = TestsOf("tests/trainer/reliability/test_ending.py")
SIGNALS.edit(
    "a signal is raised in what the collector has called, where it is lost",
    f"{ENDING.it_is_raised_when_what_was_called_from_below_has_ended}[in_a_weak_reference-2]",
    ending.is_plain,
    "code.co_name in _CALLED_FROM_BELOW or not _is_plain_place(code.co_filename, code.co_name)",
    "code.co_name in _CALLED_FROM_BELOW",
    quick=True,
)
SIGNALS.edit(
    "a signal that somebody has dropped is not raised again",
    ENDING.one_that_somebody_has_dropped_is_raised_again,
    ending.Ending.takes_look,
    "not (self._is_raised and _is_underway())",
    "not self._is_raised",
)
SIGNALS.edit(
    "what ends a run is interrupted by the same signal again",
    ENDING.what_ends_a_run_is_not_interrupted_by_its_own_signal,
    ending.Ending.takes_look,
    "not (self._is_raised and _is_underway())",
    "True",
)
SIGNALS.edit(
    "a logger that hangs is waited for",
    "tests/metrics/test_sinks.py::test_a_wandb_that_never_answers_is_waited_for_once",
    guest.Guest._guarded,
    "self._patient is None or self.longest_s is None",
    "True",
)

SIGNALS.edit(
    "output that nobody reads is no reason to end",
    TestsOf(
        "tests/trainer/reliability/test_hanging_up.py"
    ).output_that_nobody_reads_any_more_ends_the_run_with_a_checkpoint,
    console.Copied._outlives,
    "for tell in unread:",
    "for tell in ():",
)

WRITING = Area("writing")
WRITTEN = TestsOf("tests/tasks/test_writing.py")
WRITING.edit(
    "a model that sees what follows a token writes by filled-up prompts",
    WRITTEN.a_model_that_looks_ahead_runs_eagerly_and_is_counted,
    writing.FewLengths._first,
    "if not _is_near(logits.float(), expected.float(), allowed):",
    "if False:",
)
WRITING.edit(
    "a prompt whose length fits proves that a model is causal",
    WRITTEN.a_prompt_whose_length_fits_proves_nothing,
    writing.FewLengths._first,
    "elif tokens.shape[1] != self._length(tokens.shape[1]):",
    "else:",
)
WRITING.edit(
    "each length has a program of its own",
    f"{WRITTEN.it_writes_as_eager_by_a_program_of_each_power_of_two}[False]",
    writing.FewLengths._length,
    "1 << (num_tokens - 1).bit_length()",
    "num_tokens",
)
WRITING.edit(
    "the next token is that behind a filled-up prompt",
    f"{WRITTEN.it_writes_as_eager_by_a_program_of_each_power_of_two}[False]",
    writing.FewLengths.forward,
    "[:, : tokens.shape[1]]",
    "[:, -tokens.shape[1] :]",
)
