"""Measuring the engine on prompts: workloads, runs against an own baseline, records."""
