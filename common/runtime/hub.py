"""Whether the Hugging Face hub can be reached, said at once."""

from __future__ import annotations

from common.errors import UserError


def check_hub(what: str, instead: str) -> None:
    """Raise UserError if the Hugging Face hub does not answer within seconds.

    Its libraries try again for most of a minute before they say so.

    Args:
        what: what was wanted of it, such as ``model distilbert-base-uncased``.
        instead: what does without the hub.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # of httpx or requests, by version
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{what}: {constants.ENDPOINT} cannot be reached ({reason}); {instead}"
        ) from None
