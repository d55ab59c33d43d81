"""A program on a terminal as PNG: `terminal.py OUT COLUMNS ROWS SECONDS COMMAND…`. Needs `pyte` and chromium.

Braille characters, which make up charts on a terminal, are drawn as dots, because few fonts have them.
"""

import fcntl
import html
import os
import pty
import select
import struct
import sys
import tempfile
import termios
import time

import pyte

from browser import Chromium

COLOURS = {"default": "#d8d8d8", "black": "#5c6370", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b",
           "yellow": "#e5c07b", "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d8d8d8"}
# The same colours in the palette of 256 colours.
PALETTE = {"000000": "black", "cd0000": "red", "00cd00": "green", "cdcd00": "yellow", "0000ee": "blue",
           "cd00cd": "magenta", "00cdcd": "cyan", "e5e5e5": "white"}
WIDTH, HEIGHT = 8.4, 17
# The first braille character; the bits of the following ones are their dots, in this order of (column, row).
BRAILLE, DOTS = 0x2800, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]


def screen_of(command, columns, rows, seconds):
    """The screen of a command after `seconds` seconds."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            stream.feed(os.read(terminal, 1 << 16))
    os.write(terminal, b"q")
    os.waitpid(child, 0)
    return screen


def dots(text, left, top, colour):
    """The dots of the characters of braille in a text."""
    for place, character in enumerate(text):
        bits = ord(character) - BRAILLE
        for bit, (column, row) in enumerate(DOTS):
            if 0 <= bits < 256 and bits >> bit & 1:
                x, y = left + (place + 0.25 + column / 2) * WIDTH, top + (row + 0.5) * HEIGHT / 4
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" fill="{colour}"/>'


def svg(screen):
    """Runs of cells of one style, each placed by itself so that no font shifts the columns."""
    width, height = screen.columns * WIDTH + 20, screen.lines * HEIGHT + 20
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
             'font-family="DejaVu Sans Mono,Menlo,Consolas,monospace" font-size="14">'
             '<rect width="100%" height="100%" rx="6" fill="#1e2127"/>']
    for y in range(screen.lines):
        x = 0
        while x < screen.columns:
            cell = screen.buffer[y][x]
            style = (cell.fg, cell.bold, cell.reverse)
            from_x, text = x, ""
            while x < screen.columns and (c := screen.buffer[y][x]) and (c.fg, c.bold, c.reverse) == style:
                text += c.data
                x += 1
            name = PALETTE.get(cell.fg, cell.fg)
            colour = COLOURS.get(name, "#" + name if len(name) == 6 else COLOURS["default"])
            left, top = 10 + from_x * WIDTH, 10 + y * HEIGHT
            if cell.reverse:
                parts.append(f'<rect x="{left:.1f}" y="{top}" width="{len(text) * WIDTH:.1f}" height="{HEIGHT}" fill="{colour}"/>')
                colour = "#1e2127"
            parts.extend(dots(text, left, top, colour))
            text = "".join(" " if 0 <= ord(c) - BRAILLE < 256 else c for c in text)
            if text.strip():
                weight = ' font-weight="bold"' if cell.bold else ""
                parts.append(f'<text x="{left:.1f}" y="{top + 13}" fill="{colour}" textLength="{len(text) * WIDTH:.1f}" '
                             f'lengthAdjust="spacingAndGlyphs" xml:space="preserve"{weight}>{html.escape(text)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main():
    out, columns, rows, seconds, *command = sys.argv[1:]
    screen = screen_of(command, int(columns), int(rows), float(seconds))
    with tempfile.NamedTemporaryFile("w", suffix=".svg") as file:
        file.write(svg(screen))
        file.flush()
        browser = Chromium()
        browser.look(round(screen.columns * WIDTH + 20), screen.lines * HEIGHT + 20, "dark")
        browser.open(f"file://{file.name}")
        browser.picture(out)
        browser.close()


main()
