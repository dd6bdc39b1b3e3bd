"""The names that a configuration may choose from, beside those of the compiler: each list is defined here alone."""

from __future__ import annotations

from aottrain.ir.settings.choices import GENERATED, KERNELS, STRATEGIES

TASKS = ("train", "compare", "plan", "measure", "pareto", "tour", "export", "eval", "generate")
# Those of a run that has been trained, which <task>.run names.
RUN_TASKS = ("export", "eval", "generate")
# In the order in which task=compare runs them where nothing else is said; the first is what the others are compared to.
COMPARED = ("eager", "torch_compile", "aot")
# Those that keep to no budget of ours.
PEERS = ("eager", "eager_checkpoint", "torch_compile")
ENGINES = ("aot", *PEERS)
# Those that run PyTorch's operators as they are, and those that compile before the first step.
EAGER_ENGINES = ("eager", "eager_checkpoint")
COMPILING_ENGINES = ("aot", "torch_compile")
TORCH_BACKENDS = ("inductor", "aot_eager")
PARTITIONS = (*STRATEGIES, "policy", "plan")
KERNEL_FILES = (*KERNELS, "custom")
# Those under which kernels are generated, where a program has any.
GENERATING = ("auto", *GENERATED)
OPTIMIZERS = ("adamw", "sgd", "lion")
OPTIMIZER_FILES = (*OPTIMIZERS, "custom")
# Which weights of a checkpoint a task is about; auto is the mean where there is one.
WEIGHTS = ("auto", "averaged", "last")
# What task=export writes: a folder for transformers, the tensors by name, or the first of these that the recipe has.
EXPORT_FORMATS = ("auto", "hf", "weights", "safetensors")
ADAPTERS = ("none", "lora")
OPTIMIZER_KERNELS = ("auto", "generated", "torch")
LR_SCHEDULES = ("cosine", "constant", "linear", "wsd")
LR_SCHEDULE_FILES = (*LR_SCHEDULES, "custom")
# Where data is read from, and the kind of examples that this gives; a recipe says by its Options which kinds it takes.
DATA_KINDS = {"text": "tokens", "tokens": "tokens", "images": "images", "arrays": "arrays"}
DATA = (*DATA_KINDS, "custom")
# Those for which there is nothing without a path.
PATH_NEEDED = ("tokens", "arrays")
# The tokenizer that is learned from the text itself, and the one that is none: each byte is a token.
BPE = "bpe"
BYTES = "bytes"
TOKENIZERS = (BPE, BYTES)
# How the examples of a step are drawn.
ORDERS = ("random", "epochs")
# Folders of conf/ whose files change several groups at once, with what each is for.
GLOBAL_GROUPS = {
    "size": "A recipe at the size of a published model, with its learning rate; any key changes it further.",
    "experiment": "A named set of changes to other groups, or a sweep.",
    "debug": "Settings to find mistakes with.",
}
# Of raw numbers in a file of tokens, the one that is meant where nothing is said first.
TOKEN_TYPES = ("uint16", "uint32")
LOGGERS = ("wandb", "tensorboard", "mlflow", "csv")
LOGGER_MODES = ("offline", "online", "disabled")
# bf16_weights: of which the optimizer keeps float32 copies.
BF16_WEIGHTS = "bf16_weights"
FP16 = "fp16"
FP8 = "fp8"
PRECISIONS = ("fp32", "bf16", BF16_WEIGHTS, FP16, FP8)
# Of a step whose loss or gradient norm is not finite, of one whose loss is a spike, of memory that runs out, of a check
# in flight that fails.
ON_NONFINITE = ("raise", "skip", "rollback")
ON_SPIKE = ("ignore", *ON_NONFINITE)
ON_OOM = ("replan", "raise")
ON_BREACH = ("raise", "fallback")
PROFILES = ("step", "memory")
# Who chooses the jobs of a sweep, by which figures of summary.json, and who runs them.
SEARCHES = ("all", "optuna")
LOWEST_IS_BEST = ("val_loss", "best_val_loss", "last_loss", "peak_bytes", "step_ms_median", "compile_s", "saved_bytes")
HIGHEST_IS_BEST = ("tokens_per_s", "samples_per_s")
OBJECTIVES = (*LOWEST_IS_BEST, *HIGHEST_IS_BEST)
EXECUTORS = ("here", "submitit")
# Who writes a checkpoint: the run itself before its next step, or a thread from a copy.
SAVES = ("now", "background")
# How a run is done by several processes; none is one process.
PARALLELS = ("none", "ddp", "shard")
# What a checkpoint of parts is: what one process would write, or a file of each.
CHECKPOINTS = ("whole", "parts")
# Options of recipes that say where something lies, by the recipe; a run may go on where it lies elsewhere.
RECIPE_PATHS = {"hf": ("recipe.model.path",)}
