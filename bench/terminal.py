"""A program on a terminal as SVG: `terminal.py OUT COLUMNS ROWS SECONDS COMMAND…`. Needs `pyte`."""

import fcntl
import html
import os
import pty
import select
import struct
import sys
import termios
import time

import pyte

COLOURS = {"default": "#d8d8d8", "black": "#5c6370", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b",
           "yellow": "#e5c07b", "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d8d8d8"}
WIDTH, HEIGHT = 8.4, 17


def screen_of(command, columns, rows, seconds):
    """The screen of a command after so many seconds."""
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
            colour = COLOURS.get(cell.fg, "#" + cell.fg if len(cell.fg) == 6 else COLOURS["default"])
            left, top = 10 + from_x * WIDTH, 10 + y * HEIGHT
            if cell.reverse:
                parts.append(f'<rect x="{left:.1f}" y="{top}" width="{len(text) * WIDTH:.1f}" height="{HEIGHT}" fill="{colour}"/>')
                colour = "#1e2127"
            if text.strip():
                weight = ' font-weight="bold"' if cell.bold else ""
                parts.append(f'<text x="{left:.1f}" y="{top + 13}" fill="{colour}" textLength="{len(text) * WIDTH:.1f}" '
                             f'lengthAdjust="spacingAndGlyphs" xml:space="preserve"{weight}>{html.escape(text)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main():
    out, columns, rows, seconds, *command = sys.argv[1:]
    screen = screen_of(command, int(columns), int(rows), float(seconds))
    with open(out, "w") as file:
        file.write(svg(screen))


main()
