"""``python -m services.conductor``: the HTTP API and the scheduler of a mesh, until SIGTERM or SIGINT."""

from __future__ import annotations

from shared.early_signals import end_when_told

if __name__ == "__main__":
    end_when_told()
    from services.conductor.process import main  # takes a second or more, in which it may be told to stop

    main()
