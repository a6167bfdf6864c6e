"""Brings the fix for MXFP8 primary weights under Muon to releases of Megatron-LM.

``python -m tools.backport check|apply|revert PATH``; see the README beside this file.
"""
