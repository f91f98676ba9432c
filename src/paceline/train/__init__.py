"""Training of drafter networks: the target answers prompts, its features are captured, a drafter learns.

    prompts -> (prepare) token ids -> (generate) answers by the engine -> (train) a drafter -> (finish) export

Everything lives in one folder, so a run that was stopped or killed goes on where it was. Targets,
networks and attention sites are those that serve; only the `Attend` differs (`attend.py`).

Not here: what a drafter computes (`paceline.draft`) and how it is served (`paceline.engine`).
"""
