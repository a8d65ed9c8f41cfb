"""A learner of several processes (ranks): one speaks with the syncer, all copy and adopt at the same step boundary, and
each works on blocks of its own.

    shares      which rank holds and owns what; pure
    word        the small vector of each step boundary
    work        commands, which all ranks carry out in one order
    speaker     the rank that has the machine and the link; follower: the others
    link        what they need to talk to each other; gloo: over torch.distributed
"""
