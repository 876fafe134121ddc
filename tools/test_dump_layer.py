"""Decodes that NumPy computes in f64, written by dump_layer, hold in the simulator and in the reference; wrong ones do not.
docs/files.md has the tensors of each op that the command has.

    python3 tools/test_dump_layer.py COMMAND…, which runs gated-delta
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import types

import numpy as np

import dump_layer

B, H, HV, K, P = 3, 2, 4, 64, 5


def step(state, q, k, v, log_decay, beta):
    """One head's token, in f64; `state` is [V, K]. Returns the output and the state."""
    q, k = (x * (np.sum(x * x) + 1e-6) ** -0.5 for x in (q, k))
    state = np.exp(log_decay) * state
    state = state + np.outer(beta * (v - state @ k), k)
    return state @ q * K**-0.5, state


def decode(q, k, v, log_decay, beta, states, slots):
    """One token of every row. `states` are [P, HV, V, K]; a row whose slot is negative has zeros for output."""
    q, k, v, log_decay, beta, states = (x.astype("float64") for x in (q, k, v, log_decay, beta, states))
    output = np.zeros_like(v)
    for b, slot in enumerate(slots):
        for hv in range(HV) if slot >= 0 else ():
            h = hv * q.shape[2] // HV
            token = (q[b, 0, h], k[b, 0, h], v[b, 0, hv], log_decay[b, 0, hv], beta[b, 0, hv])
            output[b, 0, hv], states[slot, hv] = step(states[slot, hv], *token)
    return output, states


def draw(*dims):
    return RANDOM.standard_normal(dims).astype("float32")


def from_arrays(path, error=0.0):
    """Gates from the projection, K-last states in slots, an inactive row."""
    names = {"q": draw(B, 1, H, K), "k": draw(B, 1, H, K), "v": draw(B, 1, HV, K), "state": draw(P, HV, K, K)}
    names |= {"a": draw(B, 1, HV), "b": draw(B, 1, HV), "A_log": draw(HV), "dt_bias": draw(HV)}
    names["read_slots"] = np.array([3, -1, 0], "int32")
    a, b, a_log, dt_bias = (names[name].astype("float64") for name in ("a", "b", "A_log", "dt_bias"))
    log_decay, beta = -np.exp(a_log) * np.logaddexp(0, a + dt_bias), 1 / (1 + np.exp(-b))
    inputs = (names[name] for name in ("q", "k", "v"))
    output, states = decode(*inputs, log_decay, beta, names["state"], names["read_slots"])
    states[0, 0, 0, 0] += error
    dump_layer.write(path, "gdn_decode", names, {"o": output, "state": states}, update_state=True)


def silu(x):
    return x / (1 + np.exp(-x))


def from_projection(path, error=0.0):
    """A convolution before a decode with given gates, and a norm after it; row 1 is fresh, and its slot holds NaN."""
    keys, values, taps, eps = H * K, HV * K, 4, 1e-6
    channels = 2 * keys + values
    names = {"x": draw(B, 1, channels), "conv_weight": draw(channels, taps), "conv_bias": draw(channels)}
    names |= {"conv_state": draw(P, channels, taps - 1), "z": draw(B, 1, HV, K), "norm_weight": draw(K)}
    names |= {"g": -np.abs(draw(B, 1, HV)), "beta": RANDOM.random((B, 1, HV), "float32"), "state": draw(P, HV, K, K)}
    slots, fresh = np.array([3, 2, 0], "int32"), np.array([0, 1, 0], "int32")
    names |= {"read_slots": slots, "fresh": fresh}
    states, windows = names["state"].copy(), names["conv_state"].copy()
    states[slots[fresh != 0]] = windows[slots[fresh != 0]] = 0
    for garbage in ("state", "conv_state"):
        names[garbage][slots[fresh != 0]] = np.nan
    inputs = np.concatenate([windows[slots], names["x"].swapaxes(1, 2)], axis=2)
    windows[slots] = inputs[:, :, 1:]
    sums = np.sum(names["conv_weight"].astype("float64") * inputs, axis=2) + names["conv_bias"]
    q, k, v = np.split(silu(sums)[:, None], [keys, 2 * keys], axis=2)
    q, k, v = (x.reshape(B, 1, -1, K) for x in (q, k, v))
    o, states = decode(q, k, v, names["g"], names["beta"], states, slots)
    o = names["norm_weight"] * o / np.sqrt(np.mean(o * o, axis=3, keepdims=True) + eps) * silu(names["z"].astype("float64"))
    expected = {"o": o + error, "state": states, "conv_state": windows}
    dump_layer.write(path, "gdn_decode", names, expected, heads=H, norm_eps=eps)


def from_layer(path, error=0.0):
    """A layer that overwrites its states, V-last, with given gates and as many query heads as value heads."""

    def rule(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel):
        assert output_final_state and use_qk_l2norm_in_kernel
        states = initial_state.swapaxes(2, 3)
        output, after = decode(query, key, value, g, beta, states, range(B))
        initial_state[:] = after.swapaxes(2, 3)
        return output + error, initial_state

    layer = types.SimpleNamespace(recurrent_gated_delta_rule=rule)
    dump_layer.record_decode(layer, path)
    gates = dict(g=-np.abs(draw(B, 1, HV)), beta=RANDOM.random((B, 1, HV), "float32"))
    others = dict(initial_state=draw(B, HV, K, K), output_final_state=True, use_qk_l2norm_in_kernel=True)
    layer.recurrent_gated_delta_rule(draw(B, 1, HV, K), draw(B, 1, HV, K), draw(B, 1, HV, K), **gates, **others)
    assert layer.recurrent_gated_delta_rule is rule


def check(path, backend):
    return subprocess.run([*sys.argv[1:], "check", path, "--backend", backend], capture_output=True, text=True)


def documented():
    """Names in the page's table of tensors, by op."""
    page = pathlib.Path(__file__).parents[1] / "docs/files.md"
    tables = page.read_text().split("## Tensors")[1].split("## Results")[0]
    heads, _, *rows = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in tables.splitlines() if "|" in line)
    return {op: {row[0] for row in rows if row[heads.index(op)]} for op in ("gdn_decode", "gdn_mtp", "kda_recurrent")}


def taken(op, path):
    """Names that the command takes, by what it says to another one."""
    names = set()
    for other in ("other", "expected.other"):
        dump_layer.write(path, op, {other: draw(1)})
        names |= set(re.search("wanted one of (.*)", check(path, "reference").stderr)[1].split(", "))
    return names


RANDOM = np.random.default_rng(0)
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "layer.safetensors")
    for op, names in documented().items():
        if names != taken(op, file):
            sys.exit(f"docs/files.md, {op}: differs from what the command takes in {names ^ taken(op, file)}")
    for layer in (from_arrays, from_projection, from_layer):
        for error, wanted in ((0.0, 0), (0.5, 1)):
            layer(file, error)
            for backend in ("sim", "reference"):
                ran = check(file, backend)
                if ran.returncode != wanted:
                    sys.exit(f"{layer.__name__} on {backend}, an error of {error}: wanted exit status {wanted}, got "
                             f"{ran.returncode}\n{ran.stdout}{ran.stderr}")
print("files of dump_layer: 5 hold, 5 wrong ones do not")
