"""What other trainers call our keys: whoever types such a name is told ours."""

from __future__ import annotations

from collections.abc import Container

# Each of ours, with the words for it elsewhere.
_ELSEWHERE = {
    "adapter": "lora peft",
    "data.batch_size": "batch batch_size_per_step bs micro_batch_size per_device_train_batch_size train_batch_size",
    "data.order": "shuffle",
    "data.path": "corpus data_dir data_path dataset dataset_path input text train_file",
    "device": "cuda gpu gpus use_cuda",
    "engine": "backend compile compiler torch_compile",
    "hydra.run.dir": "log_dir logdir out out_dir output output_dir run_dir save_dir",
    "logger": "report_to tensorboard wandb",
    "lr_schedule": "lr_scheduler scheduler schedule",
    "lr_schedule.warmup_steps": "warmup warmup_iters",
    "optimizer.clip_norm": "clip clip_grad grad_clip gradient_clip gradient_clipping max_grad_norm",
    "optimizer.lr": "learning_rate max_lr",
    "partition.budget": "max_memory memory_budget memory_limit",
    "recipe": "arch architecture model model_name",
    "recipe.model.context": "block_size context_length ctx_len max_length max_seq_len seq_len sequence_length",
    "recipe.model.num_heads": "n_head n_heads",
    "recipe.model.num_layers": "depth layers n_layer n_layers",
    "recipe.model.width": "d_model dim embed_dim hidden hidden_dim hidden_size n_embd",
    "resume": "checkpoint checkpoint_path ckpt ckpt_path load resume_from resume_from_checkpoint",
    "trainer.accumulate": "accum accumulation grad_accum gradient_accumulation gradient_accumulation_steps",
    "trainer.eval_every": "eval_freq eval_interval eval_steps val_every",
    "trainer.log_every": "log_freq log_interval logging_steps",
    "trainer.num_threads": "cpus num_workers threads workers",
    "trainer.precision": "amp autocast bf16 dtype fp16 fp32 half mixed_precision",
    "trainer.save_every": "checkpoint_every save_freq save_interval save_steps",
    "trainer.steps": "epochs iterations iters max_epochs max_iters max_steps n_epochs num_epochs num_steps train_steps",
}
_OURS = {word: key for key, words in _ELSEWHERE.items() for word in words.split()}


def by_another_name(key: str, known: Container[str]) -> str:
    """Our name of what `key`, or its part after the last dot, is called elsewhere; "" where it is no such word, or
    where ours is not among the known ones."""
    ours = _OURS.get(key.rpartition(".")[2].lower(), "")
    return ours if ours in known else ""


# Options that are another option of ours, with what it does.
_OPTIONS = {
    "logger": dict.fromkeys(
        ("none", "null", "None", "off", "disabled", "false", "False"), "csv, which writes metrics.csv alone"
    ),
    "kernel": dict.fromkeys(("cuda", "gpu"), "triton") | dict.fromkeys(("cpu", "c++", "native"), "cpp"),
    "engine": dict.fromkeys(("compile", "inductor", "dynamo"), "torch_compile") | {"aottrain": "aot"},
    "parallel": dict.fromkeys(("fsdp", "fsdp2", "hsdp", "zero", "zero3", "deepspeed"), "shard")
    | dict.fromkeys(("dp", "data", "data_parallel"), "ddp"),
}


def option_by_another_name(group: str, value: str) -> str:
    """`; did you mean ours?` of what an option of a group is called elsewhere, or ""."""
    ours = _OPTIONS.get(group, {}).get(value)
    return f"; did you mean {group}={ours}?" if ours else ""
