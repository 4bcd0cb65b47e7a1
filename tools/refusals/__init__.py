"""Features of Megatron beside layerwise graphs: supported or refused, why, and what shows it."""
