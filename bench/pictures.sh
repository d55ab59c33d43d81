#!/usr/bin/env bash
# Makes the pictures of watch, serve and report in docs/images from a real small run: bench/pictures.sh MERISTEM
# MERISTEM is a binary with the feature `serve`. Needs chromium, and Python with a network for `pyte`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
meristem=$(realpath "$1")
images=$here/../docs/images
scratch=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$scratch"' EXIT

python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet pyte==0.8.2
cd "$scratch"
# The view shows a run in progress: a little after its eleventh step, most of its modules are young.
"$meristem" train --preset quick --steps 24 --max-batches 16 --seed 42 --quiet --run-dir runs/grown & training=$!
until grep -qs '"step_completed".*"step":11,' runs/grown/events.jsonl; do
  kill -0 "$training" || exit 1
  sleep 0.1
done
"$scratch/venv/bin/python" "$here/terminal.py" "$images/watch.png" 110 34 2 "$meristem" watch grown
wait "$training"

"$meristem" runs report grown --out report.html
"$meristem" serve runs --port 0 > served & server=$!
until [ -s served ]; do
  kill -0 "$server" || exit 1
  sleep 0.1
done
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
