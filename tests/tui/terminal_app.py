"""Run by test_terminal.py in a terminal of its own: the app over a session that moves.

Arguments: `hang` makes the diagnosis hang for ever, `cluster` shows 32 ranks on four nodes.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuwatch.diagnosis.types import RunDiagnosis
from gpuwatch.store.views import View
from gpuwatch.tui import GpuwatchApp
from tests.tui.fakes import MovingSession, cluster, few_workers, found, two_ranks


def hang(_: View) -> Sequence[RunDiagnosis]:
    while True:
        time.sleep(3600)


def main() -> int:
    if "cluster" in sys.argv:
        session = MovingSession([cluster(seed=seed) for seed in range(4)], 1.0)
    else:
        session = MovingSession([two_ranks(), two_ranks()])
    app = GpuwatchApp(session, hang if "hang" in sys.argv else found(few_workers()))
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
