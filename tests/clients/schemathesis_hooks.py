"""Loaded by schemathesis: what a described request may be refused for all the same."""

from __future__ import annotations

import json
import re
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, Response
from schemathesis.specs.openapi.checks import positive_data_acceptance

RELATIONS = re.compile(
    r"only the value of 'n'|'min_tokens' \d+ is more than|'max_tokens' and 'max_completion_tokens' differ"
    r"|answers are given together|maximum context length|are given in one answer"
)
"""Between the values of two fields, or of a field and the model: JSON Schema has no words for them."""


@schemathesis.check
def described_is_accepted(ctx: CheckContext, response: Response, case: Case[Any]) -> bool | None:
    """``positive_data_acceptance``, but for these."""
    if response.status_code == 400 and RELATIONS.search(json.loads(response.content)["error"]["message"]):
        return None
    return positive_data_acceptance(ctx, response, case)
