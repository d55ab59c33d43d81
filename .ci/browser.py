"""`meristem serve` in a headless browser, on a run in progress: `browser.py MERISTEM FOLDER chromium|firefox`.

Pictures of the pages are left in the folder.
"""

import os
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench"))
from browser import Chromium  # noqa: E402
from firefox import Firefox  # noqa: E402

EVIL = "<img src=x onerror=alert(1)>"
FOREIGN = '<img src="http://127.0.0.1:9/x.png">'


# Widths of document and window, and the elements that end beyond the window's edge, or whose content does, the innermost
# last. Empty if the page fits. Elements in scrolling boxes are allowed.
WIDE = """
(() => {
  const page = document.documentElement;
  if (page.scrollWidth <= page.clientWidth) return "";
  const wide = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll")
    && (e.getBoundingClientRect().right > page.clientWidth || e.scrollWidth > page.clientWidth));
  const names = wide.slice(-10).map(e => `${e.tagName}#${e.id}.${e.className} "${e.textContent.slice(0, 40)}"`);
  return [`${page.scrollWidth} of ${page.clientWidth}`, ...names].join("; ");
})()
"""


def check(what, holds):
    if not holds:
        raise SystemExit(f"browser: failed: {what}")


def copy_with_html(run, to):
    """Copies a run, with HTML in its name and texts."""
    os.makedirs(f"{to}/weights")
    for name in ("config.toml", "events.jsonl"):
        with open(f"{run}/{name}") as file:
            text = file.read()
        with open(f"{to}/{name}", "w") as file:
            file.write(text.replace("r0c1", EVIL).replace("conv_light", EVIL))


def start(meristem, folder, processes):
    """Makes a finished run and starts a run and a server, which are added to `processes`."""
    # The page shows this path, with a word wider than a phone.
    script = f"{folder}/grow{'W' * 40}.jsonl"
    with open(script, "w") as file:
        file.write('{"step": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_light"}\n')
        file.write('{"step": 1, "op": "ADVANCE", "slot": "r0c1"}\n')
    train = [meristem, "train", "--host", "minimal", "--envs", "2", "--control-split", "0.1", "--batch", "32",
             "--max-batches", "4", "--controller", f"fixed:{script}", "--quiet", "--threads", "1"]
    subprocess.run([*train, "--steps", "12", "--run-dir", f"{folder}/runs/done"], check=True)
    copy_with_html(f"{folder}/runs/done", f"{folder}/runs/{EVIL}")
    run = subprocess.Popen([*train, "--steps", "100000", "--run-dir", f"{folder}/runs/live"])
    processes.append(run)
    server = subprocess.Popen([meristem, "serve", f"{folder}/runs", "--port", "0"], stdout=subprocess.PIPE, text=True)
    processes.append(server)
    url = server.stdout.readline().split()[-1]
    while not os.path.exists(f"{folder}/runs/live/events.jsonl"):
        time.sleep(0.05)
    return run, server, url


def fits(browser, what):
    wide = browser.value(WIDE)
    check(f"{what} fits the width ({wide})", wide == "")


def pictures(browser, url, folder):
    """Each page, wide and narrow, light and dark."""
    compare = f"{url}compare?run=done&run=live"
    for name, address in (("list", url), ("run", f"{url}run/live"), ("compare", compare)):
        backgrounds = set()
        for size, (width, height) in (("wide", (1200, 1400)), ("phone", (360, 1400))):
            for scheme in ("light", "dark"):
                browser.look(width, height, scheme)
                browser.open(address)
                browser.until("document.getElementById('live').textContent.startsWith('Live')")
                fits(browser, f"{name} {size}")
                backgrounds.add(browser.value("getComputedStyle(document.body).backgroundColor"))
                browser.picture(f"{folder}/{name}-{size}-{scheme}.png")
        check(f"{name} is light or dark", len(backgrounds) == 2)


def live(browser, url):
    """Parts change without a reload; focus, choices and folded parts stay."""
    browser.look(1200, 900)
    browser.open(url)
    browser.until("document.querySelectorAll('input').length === 3")
    browser.value("document.querySelector('input[value=live]').click(), window.mark = 1, 1")
    before = browser.value("document.getElementById('list').dataset.hash")
    browser.until(f"document.getElementById('list').dataset.hash !== '{before}'")
    check("a choice stays", browser.value("document.querySelector('input[value=live]').checked && window.mark === 1"))
    browser.value("document.querySelector('input[value=done]').click(), document.querySelector('button').click(), 1")
    browser.until("location.pathname === '/compare' && document.querySelectorAll('polyline').length > 0")
    browser.open(f"{url}run/live")
    browser.until("document.querySelector('#env-0 details') !== null")
    browser.press("Tab", "Tab")
    check("Tab reaches the first link", browser.value("document.activeElement.textContent") == "All runs")
    browser.value("document.querySelector('#env-0 summary').focus(), window.mark = 2, 1")
    browser.press(" ", "Space")
    check("Space folds a part", browser.value("!document.querySelector('#env-0 details').open"))
    before = browser.value("document.getElementById('env-0').dataset.hash")
    drawn = browser.value("document.querySelector('#curves polyline').outerHTML + document.querySelector('.now').textContent")
    browser.until(f"document.getElementById('env-0').dataset.hash !== '{before}'")
    check("focus and folding stay", browser.value(
        "document.activeElement === document.querySelector('#env-0 summary')"
        " && !document.querySelector('#env-0 details').open && window.mark === 2"))
    again = browser.value("document.querySelector('#curves polyline').outerHTML + document.querySelector('.now').textContent")
    check("curves and steps go on", again != drawn)


def main():
    meristem, folder = map(os.path.abspath, sys.argv[1:3])
    kind = {"chromium": Chromium, "firefox": Firefox}[sys.argv[3]]
    browser = kind()
    processes = []
    try:
        run, server, url = start(meristem, folder, processes)
        live(browser, url)
        # The run with HTML in its name and texts.
        browser.open(f"{url}run/%3Cimg%20src%3Dx%20onerror%3Dalert%281%29%3E")
        browser.until("document.getElementById('live').textContent.startsWith('Live')")
        check("text stays text", browser.value("document.querySelectorAll('img').length === 0"))
        check("its name is shown", EVIL in browser.value("document.querySelector('h1').textContent"))
        pictures(browser, url, folder)
        browser.open(f"{url}run/live")
        run.kill()
        run.wait()
        browser.until("document.querySelector('.now').textContent.includes('killed')")
        shutil.rmtree(f"{folder}/runs/live")
        browser.until("document.querySelector('.problem')?.textContent.includes('was removed')")
        problems = browser.problems
        check(f"the browser reports no errors: {problems}", not problems)
        # Counter-check: forbidden content is reported.
        browser.value(f"document.body.insertAdjacentHTML('beforeend', '{FOREIGN}'), 1")
        limit = time.monotonic() + 30
        while not browser.problems:
            check("foreign content is refused", time.monotonic() < limit)
            # Reports arrive with answers.
            browser.value("1")
            time.sleep(0.05)
        server.terminate()
        check("the server ends with open streams", server.wait(10) == 0)
        browser.until("document.getElementById('live').textContent.includes('does not respond')")
    finally:
        browser.close()
        for process in processes:
            process.kill()
            process.wait()
    print("browser: pages, live parts, keyboard, phone, dark, hostile names: ok")


main()
