"""Runs the project's Metal shaders and their host code on a CPU. See docs/metal_sim.md."""
