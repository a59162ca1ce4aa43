// Operators that run after the backward pass: gradient check and loss scale, gradient clipping, optimizers and EMA.
// Each operator processes the tensors of all parameters. On a GPU, an operator launches its kernels in update.cu once
// per table of tensors; on the CPU, it calls the reference implementation.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gpu.h"
#include "reference/update.h"
#include "tensors.h"

namespace {

// Returns the address of a GPU tensor with `size` elements.
void *address(const Tensor &tensor, int64_t size) {
  void *data = const_cast<void *>(tensor.data());
  if (!tensor.is_gpu()) PD_THROW("custom update: a tensor is not on the GPU");
  if (tensor.numel() != size) PD_THROW("custom update: the sizes of the tensors differ");
  if (size >= 1 << 30) PD_THROW("custom update requires parameters with less than 2^30 elements");
  if (reinterpret_cast<uintptr_t>(data) % kVectorBytes)
    PD_THROW("custom update: the address of a tensor is not a multiple of 16 bytes");
  return data;
}

float *floats(const Tensor &tensor, int64_t size) {
  if (tensor.dtype() != DataType::FLOAT32) PD_THROW("custom update requires float32 state, masters and averages");
  return static_cast<float *>(address(tensor, size));
}

// Tensors of one data type, divided into tables. Each table is the argument of one kernel launch.
template <class Table>
class Tables {
 public:
  // `state` contains the tensors for Table::state. The first two tensors have the size of the parameter, and all
  // further tensors have one element.
  void add(const Tensor &gradient, const Tensor *parameter, const Tensor *master, std::vector<const Tensor *> state,
           float decay) {
    if (tables_.empty() || tables_.back().count == Table::kTensors) tables_.emplace_back();
    Table &table = tables_.back();
    const int t = table.count++;
    table.gradient[t] = address(gradient, gradient.numel());
    table.parameter[t] = parameter ? address(*parameter, gradient.numel()) : nullptr;
    table.master[t] = master ? floats(*master, gradient.numel()) : nullptr;
    for (size_t i = 0; i < state.size(); ++i) table.state[i][t] = floats(*state[i], i < 2 ? gradient.numel() : 1);
    table.size[t] = static_cast<int>(gradient.numel());
    table.decay[t] = decay;
  }

  // Calls launch(table) for each table.
  template <class Launch>
  void launch(const Launch &launch) {
    for (Table &table : tables_) launch(table);
  }

 private:
  std::vector<Table> tables_;
};

// Returns the tables of all parameters, grouped by kernel name suffix, such as "_f16".
template <class Table>
std::map<std::string, Tables<Table>> tables_by_type(const Tensors &parameters, const Tensors &gradients,
                                                    const Tensors *masters, std::vector<const Tensors *> state,
                                                    const std::vector<float> &decays) {
  std::map<std::string, Tables<Table>> by_type;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (gradients[i].dtype() != parameters[i].dtype())
      PD_THROW("custom update: the types of a gradient and its parameter differ");
    if (!masters && parameters[i].dtype() != DataType::FLOAT32)
      PD_THROW("custom update: a parameter in half precision has no float32 master");
    std::vector<const Tensor *> of_parameter;
    for (const Tensors *tensors : state) of_parameter.push_back(&tensors->at(i));
    by_type[suffix(parameters[i])].add(gradients[i], &parameters[i], masters ? &masters->at(i) : nullptr, of_parameter,
                                       decays.at(i));
  }
  return by_type;
}

void require_one_each(const Tensors &parameters, std::vector<const Tensors *> others, const Tensors *masters,
                      const std::vector<float> &decays) {
  if (masters) others.push_back(masters);
  bool matches = decays.size() == parameters.size();
  for (const Tensors *tensors : others) matches &= tensors->size() == parameters.size();
  if (!matches) PD_THROW("custom update requires a gradient, state and decay for each parameter");
}

std::vector<unsigned> update_grid() { return {static_cast<unsigned>(Gpu::get().blocks()), 1}; }
std::vector<unsigned> update_block() { return {kMaxThreads, 1}; }

// Checks whether all gradients are finite, then updates the loss scale and its counters in place. Returns a tensor [1]
// that contains the inverse of the previous loss scale, or 0 if a gradient is not finite.
std::vector<Tensor> CheckFinite(const Tensors &gradients, Tensor &scale, Tensor &good_steps, Tensor &bad_steps,
                                int raise_after_steps, int lower_after_steps, float raise_by, float lower_by) {
  LossScaling rule = {raise_after_steps, lower_after_steps, raise_by, lower_by};
  Tensor unscale = paddle::empty({1}, DataType::FLOAT32, scale.place());
  float *s = scale.data<float>(), *u = unscale.data<float>();
  int *good = good_steps.data<int>(), *bad = bad_steps.data<int>();
  if (scale.is_gpu()) {
    std::map<std::string, Tables<MomentumUpdates>> by_type;
    for (const Tensor &gradient : gradients) by_type[suffix(gradient)].add(gradient, nullptr, nullptr, {}, 0);
    void *overflow = Gpu::get().overflow();
    for (auto &[type, tables] : by_type) {
      const std::string name = "check_gradients" + type;
      tables.launch([&](MomentumUpdates &updates) {
        Gpu::get().launch(name, scale, update_grid(), update_block(), {&updates, &overflow});
      });
    }
    Gpu::get().launch("follow_loss_scale", scale, {1, 1}, {1, 1}, {&overflow, &rule, &s, &good, &bad, &u});
    return {unscale};
  }
  bool is_finite = true;
  for (const Tensor &gradient : gradients) {
    require_float32(gradient);
    is_finite &= reference::is_finite(data<float>(gradient), gradient.numel());
  }
  *u = is_finite ? 1 / *s : 0;
  rule.follow(!is_finite, s, good, bad);
  return {unscale};
}

// Returns a tensor [1] that contains the factor that unscales the gradients and limits their global norm: unscale *
// min(1, max_norm / |unscale gradients|). `unscale` is the result of CheckFinite. The factor is 0 if the step must be
// skipped. If the step is not skipped and the norm is not finite, the factor is NaN.
std::vector<Tensor> ClipFactor(const Tensors &gradients, const paddle::optional<Tensor> &unscale, float max_norm) {
  Tensor factor = paddle::empty({1}, DataType::FLOAT32, gradients.at(0).place());
  const float *u = unscale ? unscale->data<float>() : nullptr;
  float *result = factor.data<float>();
  if (factor.is_gpu()) {
    std::map<std::string, Tables<MomentumUpdates>> by_type;
    for (const Tensor &gradient : gradients) by_type[suffix(gradient)].add(gradient, nullptr, nullptr, {}, 0);
    void *partial = Gpu::get().partial();  // one sum per block
    bool is_first = true;
    for (auto &[type, tables] : by_type) {
      const std::string name = "sum_squares" + type;
      tables.launch([&](MomentumUpdates &updates) {
        Gpu::get().launch(name, factor, update_grid(), update_block(), {&updates, &u, &partial, &is_first});
        is_first = false;
      });
    }
    int sums = Gpu::get().blocks();
    Gpu::get().launch("clip_factor", factor, {1, 1}, update_block(), {&partial, &sums, &u, &max_norm, &result});
    return {factor};
  }
  double squares = 0;
  for (const Tensor &gradient : gradients) {
    require_float32(gradient);
    squares += reference::sum_squares(data<float>(gradient), gradient.numel(), u ? *u : 1);
  }
  *result = clipped(static_cast<float>(std::sqrt(squares)), u ? *u : 1, max_norm);
  return {factor};
}

// Updates exponential moving averages in place: average += weight (value - average). `unscale` is the result of
// CheckFinite or ClipFactor. If `unscale` is 0, the step is skipped.
void Ema(Tensors &averages, const Tensors &values, const Tensor &weight, const paddle::optional<Tensor> &unscale) {
  if (values.size() != averages.size()) PD_THROW("custom average requires a value for each average");
  const float *w = weight.data<float>(), *factor = unscale ? unscale->data<float>() : nullptr;
  if (weight.is_gpu()) {
    for (size_t begin = 0; begin < averages.size(); begin += Averages::kTensors) {
      Averages table = {};
      for (size_t i = begin; i < averages.size() && table.count < Averages::kTensors; ++i) {
        const int t = table.count++;
        table.size[t] = static_cast<int>(averages[i].numel());
        table.average[t] = floats(averages[i], averages[i].numel());
        table.value[t] = floats(values[i], averages[i].numel());
      }
      Gpu::get().launch("follow_averages", weight, update_grid(), update_block(), {&table, &w, &factor});
    }
    return;
  }
  if (factor && *factor == 0) return;
  for (size_t i = 0; i < averages.size(); ++i) {
    require_float32(values[i]);
    require_like(averages[i], values[i], "value");
    reference::follow_average(data<float>(values[i]), averages[i].numel(), *w, averages[i].data<float>());
  }
}

// Updates parameters in place with momentum. `masters` contains the float32 master weights of parameters in half
// precision, and is null for float32 parameters. `unscale` is the result of CheckFinite or ClipFactor.
void momentum(Tensors &parameters, const Tensors &gradients, Tensors &velocities, Tensors *masters, const Tensor &rate,
              const paddle::optional<Tensor> &unscale, float mu, bool nesterov, const std::vector<float> &decays) {
  require_one_each(parameters, {&gradients, &velocities}, masters, decays);
  const float *lr = rate.data<float>(), *factor = unscale ? unscale->data<float>() : nullptr;
  if (rate.is_gpu()) {
    for (auto &[type, tables] :
         tables_by_type<MomentumUpdates>(parameters, gradients, masters, {&velocities}, decays)) {
      const std::string name = (masters ? "momentum_masters" : "momentum") + type;
      tables.launch([&](MomentumUpdates &updates) {
        Gpu::get().launch(name, rate, update_grid(), update_block(), {&updates, &lr, &factor, &mu, &nesterov});
      });
    }
    return;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    require_float32(gradients[i]);
    reference::momentum(data<float>(gradients[i]), parameters[i].numel(), *lr, factor ? *factor : 1, mu, nesterov,
                        decays[i], velocities[i].data<float>(), parameters[i].data<float>(),
                        masters ? masters->at(i).data<float>() : nullptr);
  }
}

void Momentum(Tensors &parameters, const Tensors &gradients, Tensors &velocities, const Tensor &rate,
              const paddle::optional<Tensor> &unscale, float mu, bool nesterov, const std::vector<float> &decays) {
  momentum(parameters, gradients, velocities, nullptr, rate, unscale, mu, nesterov, decays);
}

void MomentumMasters(Tensors &parameters, const Tensors &gradients, Tensors &velocities, Tensors &masters,
                     const Tensor &rate, const paddle::optional<Tensor> &unscale, float mu, bool nesterov,
                     const std::vector<float> &decays) {
  momentum(parameters, gradients, velocities, &masters, rate, unscale, mu, nesterov, decays);
}

// Updates parameters in place with AdamW or LAMB. Each tensor in `powers1` and `powers2` has one element. For the other
// arguments, see momentum.
void adam(bool is_lamb, Tensors &parameters, const Tensors &gradients, Tensors &moments1, Tensors &moments2,
          Tensors &powers1, Tensors &powers2, Tensors *masters, const Tensor &rate,
          const paddle::optional<Tensor> &unscale, Adam rule, const std::vector<float> &decays) {
  require_one_each(parameters, {&gradients, &moments1, &moments2, &powers1, &powers2}, masters, decays);
  const float *lr = rate.data<float>(), *factor = unscale ? unscale->data<float>() : nullptr;
  if (rate.is_gpu()) {
    void *partial = Gpu::get().partial();  // kMaxLanes * kVectorBytes floats per block
    static_assert(2 * AdamUpdates::kTensors <= kMaxLanes * kVectorBytes, "LAMB's sums exceed the scratch memory");
    for (auto &[type, tables] : tables_by_type<AdamUpdates>(
             parameters, gradients, masters, {&moments1, &moments2, &powers1, &powers2}, decays)) {
      const std::string end = (masters ? "_masters" : "") + type;
      tables.launch([&](AdamUpdates &updates) {
        const auto launch = [&](const std::string &name, std::vector<void *> arguments) {
          Gpu::get().launch(name, rate, update_grid(), update_block(), std::move(arguments));
        };
        if (is_lamb) {
          launch("lamb_moments" + end, {&updates, &rule, &factor, &partial});
          launch("lamb" + end, {&updates, &rule, &lr, &factor, &partial});
        } else {
          launch("adamw" + end, {&updates, &rule, &lr, &factor});
        }
        Gpu::get().launch("advance_powers", rate, {1, 1}, {AdamUpdates::kTensors, 1}, {&updates, &rule, &factor});
      });
    }
    return;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    require_float32(gradients[i]);
    reference::adam(data<float>(gradients[i]), parameters[i].numel(), *lr, factor ? *factor : 1, rule, is_lamb,
                    decays[i], moments1[i].data<float>(), moments2[i].data<float>(), powers1[i].data<float>(),
                    powers2[i].data<float>(), parameters[i].data<float>(),
                    masters ? masters->at(i).data<float>() : nullptr);
  }
}

template <bool kIsLamb>
void AdamPlain(Tensors &parameters, const Tensors &gradients, Tensors &moments1, Tensors &moments2, Tensors &powers1,
               Tensors &powers2, const Tensor &rate, const paddle::optional<Tensor> &unscale, float beta1, float beta2,
               float epsilon, const std::vector<float> &decays) {
  adam(kIsLamb, parameters, gradients, moments1, moments2, powers1, powers2, nullptr, rate, unscale,
       {beta1, beta2, epsilon}, decays);
}

template <bool kIsLamb>
void AdamMasters(Tensors &parameters, const Tensors &gradients, Tensors &moments1, Tensors &moments2, Tensors &powers1,
                 Tensors &powers2, Tensors &masters, const Tensor &rate, const paddle::optional<Tensor> &unscale,
                 float beta1, float beta2, float epsilon, const std::vector<float> &decays) {
  adam(kIsLamb, parameters, gradients, moments1, moments2, powers1, powers2, &masters, rate, unscale,
       {beta1, beta2, epsilon}, decays);
}

}  // namespace
