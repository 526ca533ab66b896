"""A trace of one training step, for chrome://tracing and https://ui.perfetto.dev."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from deepfast.files import write_atomically
from deepfast.measure.encoders import StepCase
from deepfast.measure.settings import Settings


def write(settings: Settings, path: Path) -> int:
    """Writes the second step of deepfast's encoder at the least depth of the report.

    deepfast's ops are named ``deepfast::``. Layers are marked ``layer 0``, ``layer 1``, ...

    Returns:
        The number of layers.
    """
    depth = min(settings.depths)
    case = StepCase(settings, depth)
    marks = {}
    for number, layer in enumerate(case.encoder.layers):

        def begin(module, _args, name=f"layer {number}"):
            marks[module] = record_function(name)
            marks[module].__enter__()

        def end(module, _args, _output):
            marks.pop(module).__exit__(None, None, None)

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)
    case.run("deepfast")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled, record_function("training step"):
        case.run("deepfast")
    with TemporaryDirectory() as folder:
        # The profiler writes to a name alone, not at once.
        written = Path(folder, path.name)
        profiled.export_chrome_trace(str(written))
        write_atomically(path, written.read_bytes())
    return depth
