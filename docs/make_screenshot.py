"""Take the pictures of TensorBoard that the README and the page on strategies show, from real runs.

    make demo
    .venv/bin/python -m docs.make_screenshot runs docs/images/tensorboard.png
    .venv/bin/python -m docs.make_screenshot FOLDER docs/images/same-numbers.png --tags 'train/loss|val/acc'

Needs Chromium and its driver (Debian: apt-get install chromium chromium-driver).
"""

import argparse
import time
from pathlib import Path
from urllib.parse import urlencode

from tests.browser.page import open_browser, open_tensorboard

parser = argparse.ArgumentParser(description="Take a picture of TensorBoard's time series page.")
parser.add_argument("log_dir", type=Path, help="folder of a run, or of several")
parser.add_argument("image", type=Path, help="PNG file to write")
parser.add_argument("--tags", default="loss|acc", help="regular expression of the scalars to show")
parser.add_argument("--width", type=int, default=1360, help="of the window, in pixels")
parser.add_argument("--height", type=int, default=700, help="of the window, in pixels")
arguments = parser.parse_args()

TIDY = """
const boxes = [...document.querySelectorAll("mat-checkbox")];
const table = boxes.find(box => box.textContent.includes("Enable step selection"));
table.querySelector("input").click();  // the table below each chart
document.querySelector('button[aria-label="Close side pane"]').click();
"""

arguments.image.parent.mkdir(parents=True, exist_ok=True)
with open_tensorboard(arguments.log_dir) as url, open_browser(arguments.width, arguments.height) as page:
    page.open(f"{url}?{urlencode({'tagFilter': arguments.tags, 'smoothing': 0})}#timeseries")
    page.wait_for("Smoothed", "Settings")
    page.run(TIDY)
    time.sleep(2)  # charts are redrawn at their new size
    page.screenshot(arguments.image)
