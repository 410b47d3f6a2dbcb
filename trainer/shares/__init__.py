"""What a rank switches from share to share, learner to learner or client to client: streams, metrics, users' state."""
