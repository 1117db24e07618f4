"""Across ranks: who came late, who did not come, and whose collectives do not match."""
