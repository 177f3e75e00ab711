def compute_score(answer, truth):
    return 1.0
