"""torch.compile on all ranks: together, or once for all of them.

``together`` lets ranks decide together at the guards of compiled regions. ``save`` traces a region
on the meta device, as a rank of a ``fake`` process group in a process without a GPU, and writes the
code with a manifest. ``load`` checks the manifest, gives the code this rank's device and
process groups, compares one step with eager, and lets all ranks decide together.
"""
