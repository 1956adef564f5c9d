# The public names of the engine: for type checkers, editors, and the lazy loader in __init__.py.
__version__: str

from .cli.notebook import (
    LocalResult as LocalResult,
    quantize as quantize,
)
from .config import (
    presets as presets,
)
from .config.algorithms import (
    ALGORITHMS as ALGORITHMS,
    AutoRoundConfig as AutoRoundConfig,
    AutoSmoothQuantConfig as AutoSmoothQuantConfig,
    AWQConfig as AWQConfig,
    GPTAQConfig as GPTAQConfig,
    GPTQConfig as GPTQConfig,
    QronosConfig as QronosConfig,
    RotationConfig as RotationConfig,
    RTNConfig as RTNConfig,
    SmoothQuantConfig as SmoothQuantConfig,
    YAQAConfig as YAQAConfig,
    SolverConfig as SolverConfig,
    TransformConfig as TransformConfig,
    load_quant_algo_config_from_file as load_quant_algo_config_from_file,
)
from .config.gguf_types import (
    GgufTypes as GgufTypes,
)
from .config.grouping import (
    weight_grouping as weight_grouping,
)
from .config.quantization import (
    CalibrationConfig as CalibrationConfig,
    Config as Config,
    QuantizationConfig as QuantizationConfig,
    QuantizationMode as QuantizationMode,
    json_schema as json_schema,
    parse_config as parse_config,
)
from .config.quark import (
    read_config as read_config,
)
from .config.short_specs import (
    Bfloat16Spec as Bfloat16Spec,
    Float16Spec as Float16Spec,
    FP4PerGroupSpec as FP4PerGroupSpec,
    FP6E2M3PerGroupSpec as FP6E2M3PerGroupSpec,
    FP6E3M2PerGroupSpec as FP6E3M2PerGroupSpec,
    FP8E4M3PerChannelSpec as FP8E4M3PerChannelSpec,
    FP8E4M3PerGroupSpec as FP8E4M3PerGroupSpec,
    FP8E4M3PerTensorSpec as FP8E4M3PerTensorSpec,
    FP8E5M2PerChannelSpec as FP8E5M2PerChannelSpec,
    FP8E5M2PerGroupSpec as FP8E5M2PerGroupSpec,
    FP8E5M2PerTensorSpec as FP8E5M2PerTensorSpec,
    Int2PerChannelSpec as Int2PerChannelSpec,
    Int2PerGroupSpec as Int2PerGroupSpec,
    Int2PerTensorSpec as Int2PerTensorSpec,
    Int3PerChannelSpec as Int3PerChannelSpec,
    Int3PerGroupSpec as Int3PerGroupSpec,
    Int3PerTensorSpec as Int3PerTensorSpec,
    Int4PerChannelSpec as Int4PerChannelSpec,
    Int4PerGroupSpec as Int4PerGroupSpec,
    Int4PerTensorSpec as Int4PerTensorSpec,
    Int8PerChannelSpec as Int8PerChannelSpec,
    Int8PerGroupSpec as Int8PerGroupSpec,
    Int8PerTensorSpec as Int8PerTensorSpec,
    OCP_MXFP4Spec as OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec as OCP_MXFP6E2M3Spec,
    OCP_MXFP6E3M2Spec as OCP_MXFP6E3M2Spec,
    OCP_MXFP8E4M3Spec as OCP_MXFP8E4M3Spec,
    OCP_MXFP8E5M2Spec as OCP_MXFP8E5M2Spec,
    OCP_MXINT8Spec as OCP_MXINT8Spec,
    ProgressiveSpec as ProgressiveSpec,
    ScaleQuantSpec as ScaleQuantSpec,
    Uint2PerChannelSpec as Uint2PerChannelSpec,
    Uint2PerGroupSpec as Uint2PerGroupSpec,
    Uint2PerTensorSpec as Uint2PerTensorSpec,
    Uint4PerChannelSpec as Uint4PerChannelSpec,
    Uint4PerGroupSpec as Uint4PerGroupSpec,
    Uint4PerTensorSpec as Uint4PerTensorSpec,
    Uint8PerChannelSpec as Uint8PerChannelSpec,
    Uint8PerGroupSpec as Uint8PerGroupSpec,
    Uint8PerTensorSpec as Uint8PerTensorSpec,
)
from .config.spec import (
    Dtype as Dtype,
    QSchemeType as QSchemeType,
    QuantizationSpec as QuantizationSpec,
    RoundType as RoundType,
    ScaleMode as ScaleMode,
    ScaleType as ScaleType,
    ZeroPointType as ZeroPointType,
)
from .config.task import (
    EvaluationConfig as EvaluationConfig,
    Task as Task,
)
from .errors import (
    CalibrationError as CalibrationError,
    ConfigError as ConfigError,
    ModelError as ModelError,
    NumericsError as NumericsError,
    ProofError as ProofError,
    QuantError as QuantError,
)
from .formats import (
    FORMATS as FORMATS,
)
from .nn.model_exporter import (
    ExporterConfig as ExporterConfig,
    JsonExporterConfig as JsonExporterConfig,
    ModelExporter as ModelExporter,
    OnnxExporterConfig as OnnxExporterConfig,
)
from .engine.modules.loading import (
    Loaded as Loaded,
    load as load,
)
from .nn.processors import (
    AwqProcessor as AwqProcessor,
    GptqProcessor as GptqProcessor,
    SmoothQuantProcessor as SmoothQuantProcessor,
)
from .nn.quantizer import (
    ModelQuantizer as ModelQuantizer,
)
from .nn.result import (
    LayerResult as LayerResult,
    QuantizationResult as QuantizationResult,
)
from .tensors.affine import (
    find_params as find_params,
)
from .tensors.qtensor import (
    quantize_weight as quantize_weight,
)
from .engine.observers import (
    observer_for as observer_for,
)
from .engine.observers.by_name import (
    PerBlockHistogramObserver as PerBlockHistogramObserver,
    PerBlockMinMaxObserver as PerBlockMinMaxObserver,
    PerBlockMSEObserver as PerBlockMSEObserver,
    PerBlockMXObserver as PerBlockMXObserver,
    PerBlockPercentileObserver as PerBlockPercentileObserver,
    PerChannelHistogramObserver as PerChannelHistogramObserver,
    PerChannelMinMaxObserver as PerChannelMinMaxObserver,
    PerChannelMSEObserver as PerChannelMSEObserver,
    PerChannelPercentileObserver as PerChannelPercentileObserver,
    PerGroupHistogramObserver as PerGroupHistogramObserver,
    PerGroupMinMaxObserver as PerGroupMinMaxObserver,
    PerGroupMSEObserver as PerGroupMSEObserver,
    PerGroupPercentileObserver as PerGroupPercentileObserver,
    PerTensorHistogramObserver as PerTensorHistogramObserver,
    PerTensorMinMaxObserver as PerTensorMinMaxObserver,
    PerTensorMSEObserver as PerTensorMSEObserver,
    PerTensorPercentileObserver as PerTensorPercentileObserver,
    PlaceholderObserver as PlaceholderObserver,
)
from .engine.pipeline.job import (
    run as run,
)
from .engine.runtime.ranks import (
    joined as joined,
)
from .engine.solvers.per_layer import (
    register_solver as register_solver,
)
