HEAD = "linear_cross_entropy"


def head_figures(q, d):
    return []
