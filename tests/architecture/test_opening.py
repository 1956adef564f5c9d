"""Every place that opens a file by its path is known, with the reason why ``quantcore.sandbox.opening`` is not used.

Models, data files and artifacts are opened there alone: a stranger may have made them.
"""

import ast
from collections import Counter
from pathlib import Path

from tests.support.sources import MODULES, tree_of

OPENERS = frozenset({
    "open", "read_text", "read_bytes", "from_pretrained", "copy2", "copyfile", "copytree", "load_file", "safe_open",
    "load_dataset", "metadata_load", "fdopen", "run_path",
})  # fmt: skip
NOT_FILES = {("vault", "open"), ("received", "open"), ("parcel", "open"), ("files", "read_bytes")}
"""Objects of ours whose methods are called so: seals, parcels between ranks, tensors by name."""
OURS = {("", "read_bytes"), ("", "read_text")}
"""Functions of ours: the guard's own, and one of texts."""

GUARD = "quantcore.sandbox.opening"
ALLOWED = {
    "the guard itself": {GUARD: 5},
    "llama.cpp's converter, downloaded with a pinned hash": {"quantcore.export.gguf.converter": 3},
    "libraries read a checked copy or an open file": {
        "quantcore.engine.data.tokenizer": 1,
        "quantcore.engine.verification.consumer": 1,
        "quantcore.engine.verification.architecture": 1,
        "quantcore.report.card": 1,
        "quantcore.engine.data.media": 1,
        "quantcore.engine.data.media_files": 2,  # bytes that the guard has read
    },
    "the artifact that is being written": {
        "quantcore.checkpoint.artifact": 2,
        "quantcore.checkpoint.side_files": 1,
        "quantcore.tensors.sink": 1,
        "quantcore.engine.containers.gguf": 1,
        "quantcore.engine.containers.llama_cpp.driver": 4,  # and its job
        "quantcore.export.gguf.converted": 1,
        "quantcore.engine.verification.gate_inputs": 1,
        "quantcore.engine.blockwise.savepoint": 5,
        "quantcore.engine.blockwise.distillation": 1,
        "quantcore.engine.pipeline.build_report": 1,
        "quantcore.engine.commands.goal": 1,
        "quantcore.engine.verification.expectation": 2,
    },
    "a file of the engine's own": {
        "quantcore.export.loading": 1,
        "quantcore.export.mlx_models": 1,
        "quantcore.engine.evaluation.baseline_cache": 2,
        "quantcore.serving.inside_env": 1,
        "quantcore.sandbox.landlock": 4,
        "quantcore.data.builtin_text": 1,
        "quantcore.config.task": 1,
        "quantcore.cli.running": 1,
        "quantcore.cli.several_presets": 1,
        "quantcore.report.local_runs": 2,
        "quantcore.engine.chat.converse": 1,
    },
    "pipes to a process of the engine's own": {"quantcore.sandbox.fork_server": 3},
    "what was just downloaded, or is checked on its way": {
        "quantcore.hub.outline": 2,
        "quantcore.hub.repository": 1,
        "quantcore.hub.object_store": 1,
        "quantcore.hub.pull": 1,
        "quantcore.data.hub_dataset": 1,
    },
    "a file of settings that a person names": {
        "quantcore.config.algorithms": 1,
        "quantcore.cli.from_flags": 1,
        "quantcore.config.presets": 1,
        "quantcore.report.compare": 1,
        "quantcore.engine.evaluation.reference": 1,
    },
    "a program that a person starts on a model of theirs": {
        "quantcore.export.gguf.unpack": 2,
        "quantcore.serving.stopwatch": 2,
    },
    "what the kernel says": {
        "quantcore.engine.runtime.devices": 1,
        "quantcore.cli.readers": 1,
        "quantcore.data.template_process": 2,
        "quantcore.plan.this_machine": 4,
        "worker.cgroup": 6,
        "worker.parent_watch": 2,
        "worker.memory_watch": 1,
    },
    "the service's own folder": {
        "api.jobs.being_sent": 1,
        "api.store.manifest": 2,
        "api.store.vault": 3,
        "api.datasets.storage": 3,
        "api.jobs.service": 1,
        "api.integrity.check": 1,
        "api.http.dashboard": 1,
        "worker.node_run": 1,
        "worker.engine": 1,
        "worker.allocation": 5,  # of a launch, where no engine can write
        "worker.on_node": 7,
        "worker.shared_files": 3,
    },
    "where an artifact goes": {"quantcore.hub.local_folder": 5, "quantcore.export.gguf.splitting": 1},
    "the operator's settings": {
        "api.oidc.config": 1,
        "api.tracing": 1,
        "worker.launchers.slurm": 1,
        "worker.launchers.kubernetes": 2,
    },
}


def opened_in(module: str) -> list[str]:
    """Calls that open a file by its path, as text."""
    found = []
    for node in ast.walk(tree_of(MODULES[module])):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        owner = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
        if name in OPENERS and (owner, name) not in NOT_FILES | OURS:
            found.append(ast.unparse(node))
    return found


def test_every_place_that_opens_a_path_is_known() -> None:
    known = Counter({module: number for places in ALLOWED.values() for module, number in places.items()})
    for module in MODULES:
        if module.split(".")[0] in ("quantcore", "api", "worker"):
            calls = opened_in(module)
            assert len(calls) == known[module], (
                f"{module} opens {len(calls)} file(s) by path, known are {known[module]}: open what belongs to a model,"
                f" a dataset or an artifact with quantcore.sandbox.opening, give any other file a reason: {calls}"
            )
    assert not known.keys() - MODULES.keys()


def test_the_walk_sees_what_it_should(tmp_path: Path) -> None:
    """The test above can fail."""
    assert any("os.open" in call for call in opened_in(GUARD))
    assert opened_in("quantcore.engine.data.tokenizer")
    assert not opened_in("quantcore.tensors.source") and not opened_in("quantcore.checkpoint.headers")
