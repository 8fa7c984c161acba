"""``outrider bench``: speculation against plain decoding, quality, and loads of servers."""

from . import bench, load, quality
from .spelling import App

app = App(default="run", help="Measure speculation against plain decoding; load servers.")
app.command("run")(bench.bench)
app.command()(quality.quality)
app.command()(load.serve)
