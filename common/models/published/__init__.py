"""Models of published measurements, each written from its paper and its public configuration."""

TARGETS = {
    "resnet-50": "common.models.published.resnet:resnet_50",
    "ssd-300": "common.models.published.ssd:ssd_300",
    "gnmt": "common.models.published.gnmt:gnmt",
    "transformer-big": "common.models.published.transformer_big:transformer_big",
    "transformer-xl-base": "common.models.published.transformer_xl:transformer_xl_base",
    "transformer-xl-large": "common.models.published.transformer_xl:transformer_xl_large",
}
"""Name of a model → its ``MODULE:FUNCTION``, which is followed."""
