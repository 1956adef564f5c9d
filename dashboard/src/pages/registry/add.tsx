import { useNavigate } from "@tanstack/react-router";
import { type FormEvent, useState } from "react";
import { get, post } from "../../api/client";
import { useQuery } from "../../api/query";
import { type Job, modelOf, type RegisteredModelPage, type RegistryVersion, summaryOf } from "../../api/types";
import { modelText } from "../../names";
import { announce } from "../../ui/announcer";
import { Dialog, Failure, Field } from "../../ui/basics";
import { MODEL_NAME, nameFor } from "./rules";
import { ShippingWarning } from "./shipping-warning";

/** Adds the result of a run to the registry as the next version of a model. */
export function AddToRegistry({ job }: { job: Job }) {
  const [isOpen, setIsOpen] = useState(false);
  return (
    <>
      <button type="button" onClick={() => setIsOpen(true)}>
        Add to registry
      </button>
      {isOpen && <AddDialog job={job} onClose={() => setIsOpen(false)} />}
    </>
  );
}

function AddDialog({ job, onClose }: { job: Job; onClose: () => void }) {
  const models = useQuery("registry names", (signal) =>
    get<RegisteredModelPage>("/v1/registry/models", { limit: 100 }, signal),
  );
  const navigate = useNavigate();
  const [name, setName] = useState(() => nameFor(modelText(modelOf(job))));
  const [error, setError] = useState<Error>();
  const { verdict, goal } = summaryOf(job) ?? {};
  const add = async (event: FormEvent) => {
    event.preventDefault();
    setError(undefined);
    try {
      const version = await post<RegistryVersion>(`/v1/registry/models/${name}/versions`, { job_id: job.id });
      announce(`This result is version ${version.version} of ${name}.`);
      void navigate({ to: "/registry", search: { name } });
    } catch (caught) {
      setError(caught as Error);
    }
  };
  return (
    <Dialog title="Add to registry" onClose={onClose}>
      <p>The result becomes the next version of a model. Data retention keeps it as long as it is there.</p>
      <ShippingWarning level={verdict?.level} sentence={verdict?.sentence ?? verdict?.reason} goal={goal} />
      <form onSubmit={add}>
        <Field label="Model" hint="Lower-case letters, digits, '.', '_' and '-'. A new name makes a new model.">
          {(props) => (
            <input
              {...props}
              required
              pattern={MODEL_NAME}
              list="registered-models"
              value={name}
              onChange={(event) => setName(event.target.value)}
            />
          )}
        </Field>
        <datalist id="registered-models">
          {models.data?.data.map((model) => (
            <option key={model.name} value={model.name} />
          ))}
        </datalist>
        {error && <Failure error={error} />}
        <div className="actions">
          <button type="submit" className="primary">
            Add version
          </button>
        </div>
      </form>
    </Dialog>
  );
}
