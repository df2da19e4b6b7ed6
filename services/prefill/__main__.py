"""``python -m services.prefill``: a prefill instance beside its node's store agent."""

from __future__ import annotations

from shared.early_signals import end_when_told

if __name__ == "__main__":
    end_when_told()
    from services.prefill.process import main  # takes a second or more, in which it may be told to stop

    main()
