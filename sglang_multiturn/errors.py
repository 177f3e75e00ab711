"""Every error this package raises on purpose.

    SglangMultiturnError
    ├── ConfigError (ValueError)              a YAML key, a flag or a setting is wrong
    ├── DataError (ValueError)                a data file or one of its rows is wrong
    ├── MissingDependencyError (ImportError)  an optional package is needed and not installed
    ├── InvalidTransitionError (RuntimeError) a request was asked to enter a state it may not
    ├── LedgerError (ValueError)              tokens, log-probabilities and origins would disagree
    ├── TemplateError (ValueError)            the model's chat template cannot be proved append-only
    ├── RewardError (RuntimeError)            the reward function raised, timed out or gave no number
    ├── BatchFailedError (RuntimeError)       most of a batch failed
    ├── ToolError (Exception)                 a tool says this to the model; the rollout goes on
    ├── ToolContractError (TypeError)         a tool broke its contract; that rollout is FAILED
    ├── ToolRaisedError (RuntimeError)        a tool raised in another process; its words, type and traceback as text
    ├── ToolDiedError (RuntimeError)          the process of a tool died or was killed; what it remembered is lost
    ├── CallFailedError (RuntimeError)        a call went wrong, and `on_failure` says that its rollout fails
    └── EngineError (RuntimeError)            the engine could not do what was asked
        ├── EngineStartError                  it did not come up
        ├── EngineDiedError                   it went away; every generation in flight gets this
        ├── WeightUpdateError                 new weights were refused; the old ones still serve
        └── InvalidRequestError (ValueError)  ids outside the vocabulary, or too many of them

A message says what happened, to which id, the value got, what was allowed and what to do.
All of them survive pickling (Ray and process pools carry them): the message is the only positional argument.
"""

from __future__ import annotations


class SglangMultiturnError(Exception):
    """Base of every error of this package."""


class ConfigError(SglangMultiturnError, ValueError):
    """A YAML key, a flag or a setting is wrong."""


class DataError(SglangMultiturnError, ValueError):
    """A data file or one of its rows is wrong."""


class MissingDependencyError(SglangMultiturnError, ImportError):
    """An optional package is needed and not installed; the message gives the pip command."""

    @classmethod
    def for_extra(cls, what: str, package: str, extra: str) -> MissingDependencyError:
        """The one sentence every optional import uses: what needs which package, and how to get it."""
        return cls(f"{what} needs {package}, which is not installed: pip install 'sglang_multiturn[{extra}]'")


class InvalidTransitionError(SglangMultiturnError, RuntimeError):
    """A request was asked to enter a state its present state does not allow."""


class LedgerError(SglangMultiturnError, ValueError):
    """Tokens, log-probabilities and origins would no longer agree."""


class TemplateError(SglangMultiturnError, ValueError):
    """The model's chat template cannot be proved append-only, or refused a conversation."""


class RewardError(SglangMultiturnError, RuntimeError):
    """The reward function raised, timed out or returned something that is not a number."""


class BatchFailedError(SglangMultiturnError, RuntimeError):
    """Most of a batch failed; the message names the most frequent causes with one example of each."""


class ToolError(SglangMultiturnError):
    """Raised by a tool to tell the model what went wrong; the rollout goes on."""


class ToolContractError(SglangMultiturnError, TypeError):
    """A tool returned something its contract does not allow; the rollout is FAILED."""


class ToolRaisedError(SglangMultiturnError, RuntimeError):
    """A tool in another process raised something; the message has its type, its words and the traceback."""


class ToolDiedError(SglangMultiturnError, RuntimeError):
    """The process a tool ran in died, or was killed for what it did; the instance and its state are gone."""


class CallFailedError(SglangMultiturnError, RuntimeError):
    """A call went wrong in a way for which `on_failure` says `fail`; the cause is what the tool raised, if it did."""


class EngineError(SglangMultiturnError, RuntimeError):
    """The engine could not do what was asked."""


class EngineStartError(EngineError):
    """The engine did not come up."""


class EngineDiedError(EngineError):
    """The engine went away; every generation in flight gets this."""


class WeightUpdateError(EngineError):
    """New weights were refused; the old ones still serve."""


class InvalidRequestError(EngineError, ValueError):
    """A generation was asked for that the engine must never see."""
