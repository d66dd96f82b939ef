"""
The budget as a page to play with: one HTML file that needs no network, by `make calculator`.

    python calculator/build.py        -> calculator.html, open it in any browser

The page has no formulas of its own: kv_cache/accounting.py and arithmetic.py are translated to JavaScript, function by
function, by pscript. The chart is Plotly's, bundled. The shapes are those of configs/shape/.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `python calculator/build.py` puts only calculator/ there

from plotly.offline import get_plotlyjs
from pscript import py2js

from shapes import find_shape, presets

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent


def arithmetic():
    """The budget's functions as JavaScript of the same names."""
    source = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("kv_cache/accounting.py", "arithmetic.py"))
    source = re.sub(r"^from .*\n", "", source, flags=re.M)  # the one imports the other
    return py2js(re.sub(r'"""(.|\n)*?"""\n', "\n", source))  # functions stay, their docstrings need not travel


def page():
    """The whole page as text."""
    parts = {
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "plotly": get_plotlyjs(),
        "arithmetic": arithmetic(),
        "shapes": f"const SHAPES = {json.dumps({name: find_shape('shape', name) for name in presets()})};",
        "page": (HERE / "page.js").read_text(encoding="utf-8"),
    }
    return re.sub(r"/\* (\w+) \*/", lambda match: parts[match[1]], (HERE / "page.html").read_text(encoding="utf-8"))


if __name__ == "__main__":
    path = ROOT / "calculator.html"
    path.write_text(page(), encoding="utf-8")
    print(f"calculator.html: {path.stat().st_size / 1e6:.1f} MB, open it in a browser")
