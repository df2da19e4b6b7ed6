"""``python -m services.store``: the store agent of this node, until SIGTERM or SIGINT."""

from __future__ import annotations

from shared.early_signals import end_when_told

if __name__ == "__main__":
    end_when_told()
    from services.store.process import main  # takes a second or more, in which it may be told to stop

    main()
