"""Networks, policy and value heads, normalisation, initialisation.

Read `actor_critic.py` or `q_network.py` first.
"""
