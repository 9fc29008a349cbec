"""Let torchvision be imported beside a CPU build of torch, in the environment that runs this.

vLLM imports torchvision for models with images, whatever it serves. PyPI has a CUDA build, whose compiled
operators cannot be loaded here; without their names its import fails. This declares the two names that it registers
something for; nothing that text models run calls them. Does nothing a second time.
"""

import importlib.util
from pathlib import Path

MEND = """

if not _has_ops():
    # Added by gatesight_hf (.ci/mend_torchvision.py): names of operators that this build cannot load.
    _names = torch.library.Library("torchvision", "DEF")
    _names.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _names.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

spec = importlib.util.find_spec("torchvision")
if spec is None or spec.origin is None:
    raise SystemExit("torchvision is not installed here.")
path = Path(spec.origin).parent / "extension.py"
source = path.read_text(encoding="utf-8")
if MEND not in source:
    path.write_text(source + MEND, encoding="utf-8")
