#!/usr/bin/env bash
# Makes the README's pictures of watch, serve and report from a real small run: bench/pictures.sh MERISTEM
# MERISTEM is a binary with the feature `serve`. Needs chromium, and Python with a network for `pyte`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
meristem=$(realpath "$1")
images=$here/../docs/images
scratch=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$scratch"' EXIT

python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet pyte==0.8.2
cd "$scratch"
train() { "$meristem" train --preset quick --steps 24 --max-batches 16 --seed 42 --quiet "$@"; }
train --run-dir runs/grown
train --controller none --twin off --run-dir runs/none

"$scratch/venv/bin/python" "$here/terminal.py" "$images/watch.svg" 110 34 3 "$meristem" watch grown
"$meristem" runs report grown --out report.html
"$meristem" serve runs --port 0 > served & server=$!
until [ -s served ]; do sleep 0.1; done
url=$(head -n 1 served | awk '{print $NF}')
PYTHONPATH=$here python3 - "$url" "$images" "$scratch/report.html" <<'PY'
import sys
from browser import Chromium

url, images, report = sys.argv[1:]
browser = Chromium()
browser.look(1000, 760, "dark")
browser.open(f"{url}run/grown")
browser.until("document.getElementById('live').textContent.startsWith('Live')")
browser.picture(f"{images}/serve.png")
browser.look(1000, 760, "light")
browser.open(f"file://{report}")
browser.value("document.querySelector('details svg').closest('details').scrollIntoView(), 1")
browser.picture(f"{images}/report.png")
browser.close()
PY
ls -l "$images"
