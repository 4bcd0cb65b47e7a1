"""From a model to its graphs, as one transaction."""
