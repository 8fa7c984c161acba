"""``outrider ops``: the tools of production, for this engine and others."""

from . import advise, alerts, checklist, deploy, diagnose, guard, roi
from .spelling import App

app = App(help="Plan, deploy, watch and mend speculation, of this engine and of others.")
for command in (
    advise.advise, roi.roi, checklist.checklist, diagnose.doctor, diagnose.diagnose,
):  # fmt: skip
    app.command()(command)
app.add_typer(deploy.app, name="deploy")
app.add_typer(guard.app, name="guard")
app.add_typer(alerts.app, name="alerts")
