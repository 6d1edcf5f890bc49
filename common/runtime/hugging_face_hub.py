"""A check that the Hugging Face hub can be reached, which fails within seconds."""

from __future__ import annotations

from common.errors import UserError


def check_hub(what: str, instead: str) -> None:
    """Raises UserError if the Hugging Face hub does not answer within seconds.

    Its own libraries retry for most of a minute before they give up.

    Args:
        what: the thing wanted from the hub, such as ``model distilbert-base-uncased``.
        instead: the way to do without the hub, for the message.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # raised by httpx or requests, by version
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{what}: {constants.ENDPOINT} cannot be reached ({reason}); {instead}"
        ) from None
