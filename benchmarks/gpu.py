"""All that only a CUDA device can show, in slices of some minutes; the same command goes on where the last one ended.

    python benchmarks/gpu.py [minutes=9] [device=auto] [steps=all] [retry=false] [results=results] [plots=plots]

`device=cpu` rehearses one step of each kind at the smallest shapes; `steps` are names, or how names begin. Each step
has a process and a limit of its own. Its record, `steps/NAME.json` in a folder named by device, versions and code, is
written in one piece: a killed slice loses the step in flight. Cells of suites lie in the usual results folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from speed import cells_per_hour, conformance, largest
from tabulate import tabulate

from dpopt import fields, registry
from dpopt.bench import run
from dpopt.bench.cases import CASES
from dpopt.errors import ConfigError, unknown
from dpopt.store import Store
from dpopt.store.provenance import code, cpu, output, provenance

CARD = """
conformance-optimizers conformance-mlp conformance-cnn conformance-wrn conformance-vit conformance-gpt2
cost-vit_base_224-full cost-vit_tiny_224-full cost-mlp-full cost-cnn-full cost-vit_small_224-full cost-gpt2_small-full
cost-wrn-full draws-vit_tiny_224-full draws-vit_base_224-full draws-mlp-full
cost-vit_base_224-bitfit cost-vit_small_224-bitfit cost-vit_tiny_224-bitfit cost-vit_base_224-film
cost-vit_small_224-film cost-vit_tiny_224-film cost-vit_base_224-lora cost-vit_small_224-lora cost-vit_tiny_224-lora
cost-vit_base_224-head cost-vit_small_224-head cost-vit_tiny_224-head batch-vit_base_224 batch-vit_tiny_224 batch-cnn
batch-gpt2_small bfloat16-vit_base_224-full bfloat16-vit_tiny_224-full bfloat16-gpt2_small-full cells-quickstart
cells-mnist_five_epochs suite-hyfreedp_table2_small suite-adadp_cifar10
"""
# The steps on a device, the most valuable first: kind, case or suite, trained parameters.
REHEARSAL = """
conformance-optimizers conformance-mlp cost-mlp-full cost-vit_tiny_224-bitfit draws-mlp-full batch-mlp
bfloat16-mlp-full cells-quickstart suite-adadp_cifar10 suite-hyfreedp_table2_small
"""
# Seconds that a step of each kind may take; a suite takes whatever is left.
LIMITS = {"conformance": 240, "cost": 240, "draws": 180, "batch": 240, "bfloat16": 150, "cells": 360, "suite": 45}
TINY_LIMIT, TINY_LEFT, GRACE, REPORTING = 120, 30, 25, 20  # of a rehearsed step; of a suite to end; for the report
BATCH = {"mlp": 4096, "cnn": 1024, "wrn": 256, "vit_tiny_224": 256, "vit_small_224": 128, "vit_base_224": 64}
FULL = 40 * 2**30  # bytes of memory with which a device takes the batches of `BATCH`; fewer by powers of two
SMALL = ["epsilon=3", "seeds=[0]", "epochs=1", "batch_size=128", "accountant=rdp"]
OVERRIDES = {  # of suites: on a device, and in a rehearsal, which adds `SMALL`
    "quickstart": (
        ["optimizers=[dp_sgd,dp_adam]", "seeds=[0,1]"],
        ["optimizers=[dp_sgd]", "settings.dp_sgd.grid.lr=[1]"],
    ),
    "mnist_five_epochs": (["optimizers=[dp_adam]", "seeds=[0]", "epochs=1", "batch_size=200"], []),
    "hyfreedp_table2_small": ([], ["optimizers=[hyfreedp]"]),
    "adadp_cifar10": ([], ["optimizers=[adadp]"]),
}


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of the command line."""

    minutes: fields.Positive = 9.0
    device: str = "auto"
    steps: Any = "all"
    retry: bool = False
    results: str = "results"
    plots: str = "plots"


def rows(name: str, device: str, results: str, retry: bool) -> Iterator[dict[str, Any]]:
    """The rows that a step measures, as plain data."""
    place, tiny = torch.device(device), device == "cpu"
    kind, subject, *subset = name.split("-")
    opacus = ["opacus_hooks", "opacus_ghost"] if find_spec("opacus") else []
    if kind == "conformance" and subject == "optimizers":
        yield from conformance.noise(place)
        for optimizer in ("dp_adam", "hyfreedp", "adadp") if tiny else registry.optimizers():
            try:
                registry.create(optimizer)
            except (ConfigError, ImportError) as error:
                yield {"name": optimizer, "check": "all", "status": "skipped", "detail": str(error)}
            else:
                yield from conformance.optimizers([optimizer], place)
        return
    if kind in ("cells", "suite"):
        full, small = OVERRIDES[subject]
        overrides = ["workloads=[digits_mlp]", *small, *SMALL] if tiny else full
        if kind == "cells":
            yield from cells_per_hour.rows(subject, overrides, device)
            return
        signal.signal(signal.SIGINT, lambda number, frame: None)  # the suite's process gets it too, and ends by itself
        words = ["retry" if retry else "run", f"suite={subject}", f"results={results}", f"device={device}", "grace=15"]
        process = subprocess.run([sys.executable, "-m", "dpopt", *words, *overrides], stdin=subprocess.DEVNULL)
        store = Store(Path(results))
        run_ids = {entry["run_id"] for entry in store.manifest(subject)["cells"]}
        yield {"suite": subject, "cells": len(run_ids), "states": dict(Counter(map(store.state, run_ids)))}
        if process.returncode:
            sys.exit(process.returncode)
        return
    case = CASES[subject].rehearsal() if tiny else CASES[subject]
    if kind == "conformance":
        yield from conformance.engines([case], place)
        return
    memory = FULL if tiny else torch.cuda.get_device_properties(place).total_memory
    share = int(BATCH.get(subject, 32) * min(1.0, memory / FULL))
    batch = 16 if tiny else max(8, 2 ** share.bit_length() // 2)
    if kind == "batch":
        chosen = dataclasses.replace(case, batch_size=batch)
        yield from largest.largest(["bookkeeping", *opacus], chosen, "full", place, 64 if tiny else 2**16, 50)
        return
    words = [f"cases=[{subject}]", f"subsets={subset}".replace("'", ""), f"batch_size={batch}", f"device={device}"]
    words += ["tiny=true", "rounds=2", "threads=1"] if tiny else ["rounds=5", "limit=60"]
    many, papers, every = ([], "", "") if tiny else (["poisson", *opacus[1:]], ",fiber,adadp", ",5,10")
    # Beside vmap, all others ran out of the memory of an H100 on ViT-B.
    many += [] if tiny or subject == "vit_base_224" else ["vmap"]
    words += {
        "cost": [f"engines=[{','.join(['bookkeeping', *opacus[:1], *many])}]", "optimizers=none"],
        "draws": ["engines=none", f"optimizers=[hyfreedp{papers}]", f"probe_every=[1{every}]"],
        "bfloat16": ["engines=[bookkeeping,poisson]", "optimizers=none", "precision=bfloat16"],
    }[kind]
    yield from run.bench(run.settings(words))["rows"]


def missing(step: str) -> str:
    """The package that a step needs and that is not here, if any."""
    kind, subject, *subset = step.split("-")
    needs = {"cells": ["opacus"]}.get(kind, []) + (["timm"] if subject.startswith(("vit", "wrn")) else [])
    needs += (["transformers"] if subject.startswith("gpt2") else []) + (["peft"] if "lora" in subset else [])
    return next((package for package in needs if find_spec(package) is None), "")


def hardware(device: torch.device) -> dict[str, Any]:
    """A device as plain data: of a GPU also bytes of memory, compute capability, and versions of what drives it."""
    if device.type != "cuda":
        return {"name": cpu()}
    gpu = torch.cuda.get_device_properties(device)
    # torch does not know the version of NVIDIA's driver.
    drivers = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "name": gpu.name,
        "memory": gpu.total_memory,
        "capability": f"{gpu.major}.{gpu.minor}",
        "driver": drivers.splitlines()[0] if drivers else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def setting(device: str) -> dict[str, Any]:
    """Device, versions and code, and a digest of all that may change what is measured."""
    place = torch.device(device)
    torch.empty(0, device=place)
    origin = provenance(place)
    named = {key: origin[key] for key in ("device", "versions", "python")} | {"torch": torch.__version__}
    named |= {"hardware": hardware(place), "code": code()}
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:8]
    return named | {"commit": origin["commit"], "key": digest}


def attempt(step: str, words: Sequence[str], folder: Path, limit: float, left: float) -> dict[str, Any]:
    """Do a step in a process of its own, for at most `limit` and `left` seconds, and keep what became of it."""
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / f"{step}.rows", folder / f"{step}.log"
    file.unlink(missing_ok=True)
    resumes, started, reason = step.startswith("suite"), time.monotonic(), ""
    with log.open("wb") as output:
        streams: Any = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *words, str(file)], **streams, preexec_fn=_end_with_parent)
        try:
            process.wait(max(0.0, left - GRACE if resumes else min(limit, left)))
        except subprocess.TimeoutExpired:
            reason = "the slice ended" if resumes or left < limit else f"it takes more than {limit:g} seconds"
            os.killpg(process.pid, signal.SIGINT)  # a suite writes its checkpoints
            deadline = time.monotonic() + (GRACE if resumes else 0)
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever it has started ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not reason and process.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-12:]
        reason = "\n".join([f"exit code {process.returncode}: {last[-1] if last else ''}", *last])
    status = "cut" if reason == "the slice ended" else "failed" if reason else "done"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may have been cut short
    record = {"step": step, "status": status, "reason": reason, "seconds": time.monotonic() - started, "rows": whole}
    file.write_text(json.dumps(record, indent=1))
    file.replace(folder / f"{step}.json")
    return record


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing outlives a session that is killed


def finding(record: Mapping[str, Any]) -> str:
    """One line for the table: what a step measured, or why it did not."""
    parts = [record["reason"].partition("\n")[0][:80]]
    checks = Counter(row["status"] for row in record["rows"] if "check" in row)
    parts += [f"{checks['passed']} of {checks.total()} checks passed"] if checks else []
    for row in record["rows"]:
        if row.get("check") and row["status"] == "failed":
            parts.append(f"failed: {row['name']}, {row['check']}")
        elif row.get("time_ratio") and row["contender"] != row["baseline"]:
            memory = f" (memory {row['memory_ratio']:.2f})" if row["memory_ratio"] else ""
            parts.append(f"{row['contender']} {row['time_ratio']:.2f}{memory}")
        elif "batch" in row:
            parts.append(f"{row['contender']} {row['batch'] or 'fails'}")
        elif "cells_per_hour" in row:
            parts.append(f"{row['contender']} {row['cells_per_hour'] or 0:,.0f}/h")
        elif "states" in row:
            parts.append(f"{row['states'].get('done', 0) + row['states'].get('diverged', 0)} of {row['cells']} cells")
    return "; ".join(filter(None, parts))


def report(folder: Path, origin: Mapping[str, Any], steps: Sequence[str], plots: Path) -> str:
    """Write `table.md` and, where matplotlib is there, the figures of what steps cost; returns the table of steps."""
    records, lines = _records(folder, steps), []
    for step in steps:
        record = records.get(step, {"status": f"left out: no {missing(step)}" if missing(step) else "not yet"})
        seconds, result = (f"{record['seconds']:.0f}", finding(record)) if "seconds" in record else ("", "")
        lines.append({"step": step, "status": record["status"], "s": seconds, "result": result})
    summary = tabulate(lines, headers="keys", tablefmt="pipe", disable_numparse=True)
    versions = f"torch {origin['torch']}, Python {origin['python']}, commit {origin['commit']}, code {origin['code']}"
    parts = [f"# {origin['device']}", versions, summary]
    timed = {"rows": [row for record in records.values() for row in record["rows"] if "time_ratio" in row]}
    if timed["rows"] and find_spec("pandas") and find_spec("matplotlib"):
        import matplotlib

        from dpopt.results import figures, speed

        matplotlib.use("Agg")
        parts += [*speed.blocks(timed), speed.NOTE]
        for plot in (plot for plot in figures.plots(plots) if plot.needs == "speed"):
            for name, part in _parts(speed.frame(timed)).items():
                (folder / f"{plot.name}_{name}.svg").write_bytes(figures.render(plot.figure(part))["svg"])
    (folder / "table.md").write_text("\n\n".join(parts) + "\n")
    return summary


def _parts(frame: Any) -> dict[str, Any]:
    """The rows of many cases, divided among figures: all parameters trained, a case's subsets, optimizers, bfloat16."""
    usual, is_engine = frame["precision"] == "float32", frame["kind"] == "engine"
    masks = {"full": usual & is_engine & (frame["subset"] == "full")}
    for case in frame[frame["subset"] != "full"]["case"].unique():
        masks[case] = usual & is_engine & (frame["case"] == case)
    masks |= {"optimizers": usual & ~is_engine, "bfloat16": ~usual}
    return {name: frame[chosen] for name, chosen in masks.items() if chosen.any()}


def _records(folder: Path, steps: Sequence[str]) -> dict[str, dict[str, Any]]:
    paths = {step: folder / "steps" / f"{step}.json" for step in steps}
    return {step: json.loads(path.read_text()) for step, path in paths.items() if path.exists()}


def main(words: Sequence[str]) -> int:
    """One slice. Returns 1 where a step or a check has failed, else 0.

    Raises:
        ConfigError: a key or a step that is not there, or no CUDA device where one is asked for.
    """
    started, console = time.monotonic(), Console(stderr=True)
    values = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}
    keys = fields.build(Keys, values, "gpu")
    if keys.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError("device", keys.device, "there is no CUDA device; device=cpu rehearses the steps")
    device = "cuda" if keys.device == "auto" else keys.device
    every = (REHEARSAL if (tiny := device == "cpu") else CARD).split()
    chosen = [""] if keys.steps == "all" else fields.listed(keys.steps)
    for name in chosen:
        if name and not any(f"{step}-".startswith(f"{name}-") for step in every):
            raise unknown("steps", name, every)
    steps = [step for step in every if any(not name or f"{step}-".startswith(f"{name}-") for name in chosen)]
    # A process of its own looks at the device; this one leaves the device's memory to the steps.
    look = subprocess.run([sys.executable, __file__, "--setting", device], capture_output=True, text=True)
    if look.returncode:
        raise ConfigError("device", device, look.stderr.strip().rpartition("\n")[2])
    origin = json.loads(look.stdout)
    name = re.sub(r"[^a-z0-9]+", "-", origin["hardware"]["name"].lower()).strip("-")
    folder = Path(keys.results) / ("gpu" if tiny else "published/gpu") / f"{name}-{origin['key']}"
    results, begun = folder / "store" if tiny else Path(keys.results), 0
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        status = _records(folder, [step]).get(step, {"status": ""})["status"]
        limit = min(TINY_LIMIT if tiny else 3600, LIMITS[step.partition("-")[0]])
        left = started + 60 * keys.minutes - REPORTING - time.monotonic()
        is_settled = status == "done" or (status == "failed" and not keys.retry)
        if is_settled or missing(step) or left < (TINY_LEFT if tiny else limit):
            continue
        job = [__file__, "--step", step, device, str(results.resolve()), json.dumps(keys.retry)]
        with console.status(step):
            record, begun = attempt(step, job, folder / "steps", limit, left), begun + 1
        console.print(f"{step}: {record['status']} after {record['seconds']:.0f} s", highlight=False)
    print(report(folder, origin, every, Path(keys.plots)))
    records = _records(folder, steps).values()
    done = sum(record["status"] == "done" for record in records)
    console.print(f"{begun} begun; {done} of {len(steps)} done; {folder / 'table.md'}", highlight=False)
    return int(any("failed" in (r["status"], *(row.get("status") for row in r["rows"])) for r in records))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--setting"]:
        print(json.dumps(setting(sys.argv[2])))
    elif sys.argv[1:2] == ["--step"]:
        with Path(sys.argv[-1]).open("a", buffering=1) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows(*sys.argv[2:5], json.loads(sys.argv[5])))
    else:
        try:
            sys.exit(main(sys.argv[1:]))
        except ConfigError as error:
            sys.exit(str(error))
